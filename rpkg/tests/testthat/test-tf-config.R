test_that("wrong arguments are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    make_tf_config(8080)
    make_tf_config(character())
    make_tf_config("a:1", index = -1)
    make_tf_config("a:1", role = "boss")
    make_tf_config("a:1", ps = 3)
  })
})

test_that("one worker is a list of one in JSON", {
  skip_if_no_pybackend()
  config <- make_tf_config("10.0.0.1:2222", index = 0)
  expect_match(config, "\\[\\s*\"10.0.0.1:2222\"\\s*\\]")
})

test_that("all roles reach Python", {
  skip_if_no_pybackend()
  config <- make_tf_config(
    c("a:1", "b:1"),
    index = 0,
    role = "chief",
    chief = "c:1",
    ps = "d:1",
    evaluator = "e:1"
  )
  for (address in c("a:1", "b:1", "c:1", "d:1")) {
    expect_match(config, address, fixed = TRUE)
  }
  expect_match(config, "chief", fixed = TRUE)
})

test_that("a configuration that makes TensorFlow hang is a cluster error", {
  skip_if_no_pybackend()
  expect_error(make_tf_config(c("a:1", "a:1"), 0), class = "tfdist_error_cluster")
  expect_error(make_tf_config(c("a:0", "b:1"), 0), class = "tfdist_error_cluster")
  expect_error(make_tf_config(c("a:1", "b:1"), 2), class = "tfdist_error_cluster")
})

test_that("wrong arguments of join_workers() are errors", {
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
