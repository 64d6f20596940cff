test_that("what a fit cannot know is asked for by name", {
  fit <- example_fit()
  known <- example_fit()
  known$call <- plain_call(quote(barrier_train(
    sc = "local",
    data = flowers_gone,
    label = "Species"
  )))
  expect_snapshot(error = TRUE, {
    update(fit)
    update(fit, sc = "local")
    update(known)
    # Functions of packages are not data.
    {
      known$call$data <- quote(df)
      update(known)
    }
    update(known, model = 3)
    update(known, 10)
    update(known, . ~ . - x)
    update(known, epochs = 0)
    generics::fit(known, epoch = 2)
    generics::fit(known, iris)
  })
})

test_that("a fit keeps names of data, not data, and plain settings", {
  call <- as.call(list(quote(barrier_train), sc = "local", data = iris, label = quote(Species)))
  expect_named(plain_call(call), c("sc", "label"))
  settings <- list(batch_size = 8L, seed = NULL, recovery = recovery("run-1"), shuffle = FALSE)
  expect_named(plain_settings(settings), c("batch_size", "shuffle"))
})

test_full("training on is as if the training had not been interrupted", {
  skip_if_no_pybackend()
  flowers <- iris[c(1:40, 61:100, 111:150), ]
  # Levels that look like codes.
  flowers$Species <- factor(as.integer(flowers$Species))
  train <- function(epochs, seed = NULL) {
    size <- 16L
    # Two workers, whose order of rows depends on the seed and the epoch.
    barrier_train(
      "local",
      dense_model(),
      flowers,
      Species ~ .,
      workers = 2,
      epochs = epochs,
      batch_size = size,
      validation_data = flowers,
      validation_freq = c(1, 3, 5),
      class_weight = c("3" = 5),
      seed = seed,
      verbose = 0
    )
  }
  first <- train(1)
  whole <- train(3, first$seed)
  path <- withr::local_tempfile(fileext = ".rds")
  saveRDS(first, path)
  first <- readRDS(path)
  rest <- update(first, epochs = 2)
  expect_identical(nrow(rest$workers), 2L)
  expect_identical(unique(as.data.frame(rest)$epoch), 2:3)
  expect_equal(fit_weights(rest), fit_weights(whole), tolerance = 1e-5)
  expect_equal(rest$history$loss, whole$history$loss[2:3], tolerance = 1e-5)
  expect_identical(rest$settings$class_weight, c("3" = 5))
  expect_identical(rest$formula, first$formula)

  # A fit that is passed as the model has only the columns and levels of its training.
  again <- generics::fit(rest, data = rev(flowers), workers = 1)
  expect_identical(unique(as.data.frame(again)$epoch), 4:5)
  other <- transform(flowers, Species = factor(Species == "1"))
  expect_error(update(rest, data = other), "levels of the training", class = "tfdist_error_input")
})
