test_that("a run of tfruns is told what keras3 would tell it", {
  skip_if_no_pybackend()
  skip_if_not_installed("tfruns")
  folder <- withr::local_tempdir()
  model <- dense_model()
  script <- withr::local_tempfile(
    lines = c(
      "fit <- barrier_train('local', model, list(x, y), workers = 1, epochs = 2, verbose = 0)",
      "figures <- evaluate.tfdist_fit(fit, x, y)"
    ),
    fileext = ".R"
  )
  scope <- rlang::env(asNamespace("tfdist"), model = model)
  list2env(rlang::set_names(iris_arrays(), c("x", "y")), scope)
  suppressMessages(tfruns::training_run(
    script,
    run_dir = file.path(folder, "first"),
    envir = scope,
    view = FALSE,
    echo = FALSE
  ))
  runs <- tfruns::ls_runs(runs_dir = folder)
  # tfruns stores four decimals of a metric.
  expect_equal(runs$metric_accuracy, round(scope$fit$history$accuracy[[2]], 4))
  expect_equal(runs$eval_loss, scope$figures[["loss"]], tolerance = 1e-4)
  expect_identical(c(runs$samples, runs$batch_size, runs$epochs_completed), c(150L, 32L, 2L))
  expect_equal(runs$learning_rate, 0.01, tolerance = 1e-6)
  expect_identical(runs$loss_function, "sparse_categorical_crossentropy")
  expect_match(runs$model, "Dense")
})
