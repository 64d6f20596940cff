test_that("bad ways to scale the learning rate are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    scale_learning_rate("cubic")
    scale_learning_rate("sqrt", warmup_epochs = -1)
    scale_learning_rate(decay = 0.1)
    scale_learning_rate(decay = c("1.5" = 0.1))
    scale_learning_rate(decay = c("2" = 0))
    barrier_train("local", dense_model, iris, scale_lr = "cubic")
    barrier_train("local", dense_model, iris, scale_lr = exchange())
  })
  expect_error(scale_learning_rate(decay = c("1" = 1, "1" = 2)), class = "tfdist_error_input")
})

test_that("a scaled learning rate shows what it is", {
  expect_snapshot(scale_learning_rate("sqrt", 5, c("30" = 0.1, "60" = 0.01)))
})

test_full("the learning rate follows the workers", {
  skip_if_no_pybackend()
  expect_same_arguments("scale_learning_rate", "ScaleLearningRate")
  scale <- scale_learning_rate("sqrt", decay = c("1" = 0.5))
  python <- as_python_options(scale, NULL)
  expect_identical(python$multiple(4L, 0), 2)
  expect_identical(python$multiple(4L, 1), 1)
  fit <- barrier_train(
    "local",
    dense_model(),
    iris_arrays(),
    workers = 2,
    epochs = 2,
    scale_lr = scale,
    seed = 1,
    verbose = 0
  )
  rate <- as.numeric(fit$model$optimizer$learning_rate$numpy())
  expect_equal(unlist(fit$history$learning_rate), rate * sqrt(2) * c(1, 0.5), tolerance = 1e-6)
})
