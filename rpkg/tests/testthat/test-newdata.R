test_that("columns of a matrix within a data frame are found by name", {
  skip_if_no_pybackend()
  rows <- data.frame(y = seq(0, 1, length.out = 20))
  rows$m <- matrix(sin(seq_len(40)), 20, dimnames = list(NULL, c("u", "v")))
  keras <- reticulate::import("keras")
  model <- keras$Sequential(list(keras$Input(reticulate::tuple(2L)), keras$layers$Dense(1L)))
  model$compile("sgd", "mse")
  fit <- barrier_train("local", model, rows, y ~ ., workers = 1, seed = 1, verbose = 0)
  expect_identical(fit$feature_names, c("m_u", "m_v"))
  turned <- rows
  turned$m <- rows$m[, 2:1]
  expect_equal(predict(fit, turned), predict(fit, rows))
  expect_error(
    barrier_train("local", model, rows, y ~ ., validation_data = turned, workers = 1),
    "has \"m_v\" where the training has \"m_u\""
  )
  path <- withr::local_tempfile(fileext = ".json")
  read <- read_fit(write_model(fit, path))
  expect_error(update(read, sc = "local", data = rows), "has no arguments of its training")
})
