test_that("options are the defaults of workers and verbose", {
  call <- function(
    workers = getOption("tfdist.workers"),
    verbose = getOption("tfdist.verbose", 1)
  ) {
    check_arguments(c("workers", "verbose"))
  }
  expect_identical(call(), list(workers = NULL, verbose = 1))
  withr::local_options(tfdist.workers = 4, tfdist.verbose = 0)
  expect_identical(call(), list(workers = 4, verbose = 0))
  expect_identical(call(workers = 2, verbose = 2), list(workers = 2, verbose = 2))
})

test_that("errors name the option, unless the argument is given", {
  skip_if_no_pybackend()
  withr::local_options(
    tfdist.workers = "four",
    tfdist.verbose = 7,
    tfdist.max_function_mb = "much"
  )
  expect_snapshot(error = TRUE, {
    train_mnist()
    train_mnist(workers = 2)
    train_mnist(workers = 0, verbose = 0)
    barrier_apply("local", function(ctx) 1, workers = 2, verbose = 0)
  })
})

test_that("an option turns the fork server off", {
  skip_if_no_pybackend()
  withr::local_envvar(TFDIST_FORK_SERVER = NA)
  environ <- reticulate::import("os")$environ
  for (value in c(FALSE, TRUE)) {
    withr::local_options(tfdist.fork_server = value)
    open_place("local")
    expect_identical(environ$get("TFDIST_FORK_SERVER"), as.character(as.integer(value)))
  }
  withr::local_options(tfdist.fork_server = "no")
  expect_error(open_place("local"), "fork_server = ", class = "tfdist_error_input")
})
