test_that("wrong arguments are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    join_workers(8080, 0)
    join_workers(c("a:1", "b:1"), -1)
    join_workers(c("a:1", "b:1"), 0, secret_file = 1)
    join_workers(c("a:1", "b:1"), 0, secret_file = "/no/such/file")
  })
})

test_that("the variables are set, and reach a Python that runs already", {
  skip_if_no_pybackend()
  withr::local_envvar(TF_CONFIG = NA, TFDIST_SECRET_FILE = NA)
  secret <- withr::local_tempfile(lines = "a secret of this test")
  config <- join_workers(c("a:1", "b:1"), 1, secret_file = secret)
  expect_identical(Sys.getenv("TF_CONFIG"), config)
  expect_identical(basename(Sys.getenv("TFDIST_SECRET_FILE")), basename(secret))
  environ <- reticulate::import("os")$environ
  open_place(NULL)
  expect_identical(environ$get("TF_CONFIG"), config)
  Sys.unsetenv("TF_CONFIG")
  open_place(NULL)
  expect_null(environ$get("TF_CONFIG"))
})

test_that("a description of the sessions that makes no sense is an error", {
  skip_if_no_pybackend()
  withr::local_envvar(TF_CONFIG = "{'cluster'")
  expect_error(train_mnist(NULL), "TF_CONFIG is not JSON", class = "tfdist_error_cluster")
})
