test_that("a bundle contains the model, also one that is in a file", {
  skip_if_no_pybackend()
  skip_if_not_installed("bundle")
  path <- withr::local_tempfile(fileext = ".h5")
  model <- dense_model()
  write_model(model, path)
  fit <- example_fit()
  fit["model_base64"] <- list("")
  fit["model_uri"] <- list(path)
  fit["model_sha256"] <- list(NULL)
  fit["decoded"] <- list(new.env(parent = emptyenv()))
  bundled <- bundle::bundle(fit)
  unlink(path)
  stored <- withr::local_tempfile(fileext = ".rds")
  saveRDS(bundled, stored)
  again <- bundle::unbundle(readRDS(stored))
  expect_s3_class(again, "tfdist_fit")
  expect_equal(fit_weights(again), model$get_weights())
})

test_that("a path that cannot be written is named before the model is read", {
  skip_if_no_pybackend()
  fit <- example_fit()
  expect_error(
    export_savedmodel.tfdist_fit(fit, "/proc/new"),
    "`export_dir_base`: \"/proc/new\" cannot be written: No such file or directory",
    class = "tfdist_error_input"
  )
  expect_error(
    write_model(fit, "/proc/fit.json"),
    "`path`: \"/proc/fit.json\" cannot be written: No such file or directory",
    class = "tfdist_error_input"
  )
})
