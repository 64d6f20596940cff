test_that("a tracker is checked when it is made", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    track_mlflow(experiment = 3)
    track_mlflow(tags = "a")
    track_mlflow(nested = NA)
    track_wandb(tags = 1)
    train_mnist("local", callbacks = "mlflow")
  })
  skip_if_no_pybackend()
  expect_s3_class(track_mlflow(tags = c(team = "a")), "tfdist_tracker")
  expect_s3_class(track_wandb(tags = "a"), "tfdist_tracker")
})

test_full("a training in R is a run of MLflow", {
  skip_if_no_pybackend()
  # MLflow reads this variable from Python, whose copy of the environment may be older.
  environ <- reticulate::import("os")$environ
  environ$`__setitem__`("MLFLOW_ALLOW_FILE_STORE", "true")
  withr::defer(environ$`__delitem__`("MLFLOW_ALLOW_FILE_STORE"))
  mlflow <- reticulate::import("mlflow")
  before <- mlflow$get_tracking_uri()
  withr::defer(mlflow$set_tracking_uri(before))
  uri <- paste0("file://", normalizePath(withr::local_tempdir()))
  tracker <- track_mlflow("flowers", run_name = "first", tags = c(team = "a"), tracking_uri = uri)
  fit <- train_flowers(iris, epochs = 2, callbacks = list(tracker))
  client <- mlflow$MlflowClient()
  experiment <- client$get_experiment_by_name("flowers")
  runs <- reticulate::iterate(client$search_runs(list(experiment$experiment_id)))
  expect_length(runs, 1L)
  run <- runs[[1L]]
  expect_identical(run$info$status, "FINISHED")
  expect_identical(run$data$tags$team, "a")
  history <- reticulate::iterate(client$get_metric_history(run$info$run_id, "loss"))
  expect_identical(vapply(history, function(one) one$value, 0), as.numeric(fit$history$loss))
  model <- run$outputs$model_outputs[[1L]]$model_id
  found <- mlflow$models$get_model_info(paste0("models:/", model))$signature
  expect_identical(as.integer(found$inputs$inputs[[1L]]$shape), c(-1L, 4L))
})

test_full("a training writes for TensorBoard, which opens and ends", {
  skip_if_no_pybackend()
  folder <- file.path(withr::local_tempdir(), "run")
  fit <- train_flowers(iris, epochs = 2, callbacks = track_tensorboard(folder))
  expect_identical(fit$tensorboard, normalizePath(folder))
  expect_length(list.files(file.path(folder, "train"), "tfevents"), 1L)

  expect_message(view <- view_tensorboard(fit, open = FALSE), "http://127.0.0.1:")
  on.exit(view$close())
  answer <- jsonlite::fromJSON(paste0(view$url, "data/environment"))
  expect_match(answer$data_location, folder, fixed = TRUE)
  view$close()
  expect_error(suppressWarnings(readLines(view$url)))
})

test_that("there must be something to show", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    view_tensorboard(example_fit())
    view_tensorboard(7)
    track_tensorboard(7)
    track_tensorboard("")
    train_mnist("local", tensorboard = TRUE)
  })
})

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
