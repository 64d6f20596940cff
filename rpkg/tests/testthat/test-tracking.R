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
