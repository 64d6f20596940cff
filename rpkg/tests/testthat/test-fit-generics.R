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

test_that("history and figures are tibbles", {
  fit <- example_fit()
  history <- generics::tidy(fit)
  expect_s3_class(history, "tbl_df")
  expect_identical(as.list(history), as.list(as.data.frame(fit)))
  row <- generics::glance(fit)
  expect_identical(dim(row), c(1L, 9L))
  expect_identical(row$rows, 100L)
  expect_identical(row$val_loss, 1)
})

test_that("predictions stand beside the rows", {
  skip_if_no_pybackend()
  fit <- example_fit(levels = levels(iris$Species))
  fit$features <- names(iris)[1:4]
  fit$decoded <- rlang::env(model = dense_model())
  rows <- iris[c(1, 51), ]
  beside <- generics::augment(fit, rows)
  expect_identical(as.list(beside[1:5]), as.list(rows))
  expect_identical(as.list(beside[6:9]), as.list(predict(fit, rows)))
  expect_named(generics::augment(fit, rows, type = "class"), c(names(iris), ".pred_class"))
  expect_snapshot(error = TRUE, {
    generics::augment(fit, as.matrix(iris[1:4]))
    generics::augment(fit, rows, type = "raw")
    generics::augment(fit, beside)
  })
})
