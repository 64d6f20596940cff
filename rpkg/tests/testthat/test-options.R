test_that("options print their fields", {
  expect_snapshot({
    exchange(compression = "bf16", bucket_mb = Inf)
    local_steps(100, learning_rate = 0.7, momentum = 0.9)
    data_options(categories = list(color = c("blue", "red")))
  })
})

test_that("only a constructor makes options", {
  expect_snapshot(error = TRUE, {
    check_options("tcp", c("exchange", "local_steps"), "exchange", NULL)
    check_options(exchange(), "data_options", "data_options", NULL)
  })
  expect_null(check_options(NULL, "exchange"))
})

test_that("options have the same names and defaults in R and Python", {
  skip_if_no_pybackend()
  expect_same_arguments("exchange", "Exchange")
  expect_same_arguments("local_steps", "LocalSteps")
  expect_same_arguments("data_options", "DataOptions")
})

test_that("options become Python's objects", {
  skip_if_no_pybackend()
  expect_null(as_python_options(NULL, NULL))
  python <- as_python_options(local_steps(8, momentum = 0.9, compression = "fp16"), NULL)
  expect_s3_class(python, "pybackend.job.options.LocalSteps")
  expect_identical(python$steps, 8L)
  expect_identical(python$momentum, 0.9)
  expect_identical(as_python_options(exchange(bucket_mb = Inf), NULL)$bucket_mb, Inf)
  options <- data_options(tensors = list(words = list("int32", NA)), repartition = FALSE)
  expect_identical(as_python_options(options, NULL)$repartition, FALSE)
})
