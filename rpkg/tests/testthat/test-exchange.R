test_that("bad ways to exchange are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    exchange(transport = "udp")
    exchange(compression = "zip")
    exchange(transport = "tf", compression = "fp16")
    exchange(bucket_mb = 0)
    exchange(loss_over = "batch")
    exchange(encrypt = "yes")
    exchange(transport = "tf", encrypt = TRUE)
    exchange(audit = "no")
    exchange(shard_optimizer = NA)
    exchange(shard_optimizer = TRUE, compression = "fp16")
    local_steps(1)
    local_steps(10, learning_rate = Inf)
    local_steps(10, momentum = 1)
    local_steps(10, compression = "zip")
    local_steps(10, encrypt = NA)
  })
  expect_true(exchange(shard_optimizer = TRUE)$shard_optimizer)
  expect_error(exchange(bucket_mb = "all"), class = "tfdist_error_input")
  expect_error(local_steps(0), class = "tfdist_error_input")
})

test_that("a rule for the learning rate is a name, or a list of one and its settings", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    exchange(scale_lr = "cubic")
    exchange(scale_lr = exchange())
    exchange(scale_lr = list("cubic"))
    exchange(scale_lr = list("sqrt", warmup_epochs = -1))
    exchange(scale_lr = list(decay = 0.1))
    exchange(scale_lr = list(decay = c("1.5" = 0.1)))
    exchange(scale_lr = list(decay = c("2" = 0)))
    barrier_train("local", dense_model, iris, scale_lr = "linear")
  })
})

test_full("the learning rate follows the workers", {
  skip_if_no_pybackend()
  scaled <- exchange(scale_lr = list("sqrt", decay = c("1" = 0.5)))
  python <- as_python_options(scaled, NULL)$scale_lr
  expect_identical(python$multiple(4L, 0), 2)
  expect_identical(python$multiple(4L, 1), 1)
  fit <- barrier_train(
    "local",
    dense_model(),
    iris_arrays(),
    workers = 2,
    epochs = 2,
    exchange = scaled,
    seed = 1,
    verbose = 0
  )
  rate <- as.numeric(fit$model$optimizer$learning_rate$numpy())
  expect_equal(unlist(fit$history$learning_rate), rate * sqrt(2) * c(1, 0.5), tolerance = 1e-6)
})
