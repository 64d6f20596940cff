test_that("arguments are checked before Python is used", {
  fit <- example_fit(levels = levels(iris$Species))
  fit$label <- "Species"
  expect_snapshot(error = TRUE, {
    generics::evaluate(fit, iris[1:4])
    generics::evaluate(fit, as.matrix(iris[1:4]), iris$Species[1:9])
    generics::evaluate(fit, iris, batchsize = 3)
    generics::evaluate(fit, iris, batch_size = 0)
    generics::evaluate(fit, transform(iris, Species = rev(factor(Species == "setosa"))))
  })
})

test_that("this session computes what workers compute, and takes a fit's columns", {
  skip_if_no_pybackend()
  fit <- train_flowers(iris)
  figures <- generics::evaluate(fit, rev(iris))
  expect_named(figures, c("loss", "accuracy"))
  on_workers <- barrier_evaluate("local", fit, iris, label = "Species")
  expect_equal(figures, on_workers[names(figures)], tolerance = 1e-5)
  expect_equal(generics::evaluate(fit, as.matrix(iris[1:4]), iris$Species), figures)
  selected <- generics::evaluate(fit, iris, label = Species, features = ends_with("th"))
  expect_equal(selected, figures)

  # Arguments are values, even if a column has the same name.
  rows <- cbind(iris[1:4], Species = as.integer(iris$Species) - 1L)
  rows <- cbind(rows, label = 0L, features = 1, weight = 0)
  in_python <- generics::evaluate(fit, reticulate::r_to_py(rows))
  expect_equal(in_python[names(figures)], figures, tolerance = 1e-5)

  model <- fit$model
  model$compiled <- FALSE
  expect_error(generics::evaluate(fit, iris), "not compiled", class = "tfdist_error_input")
})
