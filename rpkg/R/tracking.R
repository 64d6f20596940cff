#' Record training runs in MLflow or Weights & Biases
#'
#' Pass the result in the `callbacks` argument of [barrier_train()], [train_mnist()] or
#' [ml_keras()], or through `parsnip::set_engine("tfdist", callbacks = )`. This session makes one
#' run for each training and records it. The workers do not need the tracking package, its server or
#' its key.
#'
#' @details
#' A run contains:
#' * the settings of the call as parameters, with the seed and the versions;
#' * the metrics of each epoch and, within an epoch, those over the first worker's rows every few
#'   seconds (`step/loss`, `step/rows_per_second`). Their step numbers count over all epochs;
#' * at the end, times and rows per second of the call and of each of the first 64 workers
#'   (`system/`), the audit (`audit/`), and the test metrics of [train_mnist()] (`test/`);
#' * the files `plan.txt`, `report.html` (see [report()]) and `result.json`, and the model, which in
#'   MLflow has its signature;
#' * the version of tfdist, the hosts, the digest of the model, and the git commit of the working
#'   directory.
#'
#' If training fails, the run is marked as failed, with the error as the tag `tfdist.error` (in
#' wandb's summary, `tfdist/error`). If you interrupt training, MLflow marks the run as `KILLED`. A
#' run that is already active in this session's Python is used and stays open. If the server fails
#' during training, a note reports it once, and training continues.
#'
#' R's own mlflow package has separate runs: `mlflow::mlflow_start_run()` does not affect the runs
#' that are made here, but it can read them from the same server.
#'
#' @param experiment Name of the experiment, which is created if necessary. `NULL` (default): the
#'   active one.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param run_name Name of the run. `NULL` (default): a random name.
#' @param tags For MLflow, a named list of text; for wandb, a character vector.
#' @param nested `TRUE`: if a run is active, this run is its child, as those of [train_many()] are.
#' @param tracking_uri URI of MLflow's tracking server for this session. `NULL` (default): the
#'   environment variable `MLFLOW_TRACKING_URI` at the time when Python starts.
#' @param steps `FALSE` records no metrics within epochs.
#' @param log_model `FALSE` does not record the model. If [model_options()] has a `uri`, only the
#'   URI is recorded in any case.
#' @param project Name of the project. `NULL` (default): the environment variable `WANDB_PROJECT`.
#' @param group Group of the run, such as the trials of a search.
#'
#' @return An object for `callbacks`. It requires the Python package mlflow or wandb:
#'   `install_tfdist(extras = c("cpu", "mlflow"))`.
#' @name track_mlflow
#' @export
#' @examples
#' \dontrun{
#' tracker <- track_mlflow("digits", tracking_uri = "http://127.0.0.1:5000")
#' fit <- train_mnist("local", callbacks = list(tracker))
#' }
track_mlflow <- new_maker("track_mlflow", "tracker")

#' @rdname track_mlflow
#' @export
track_wandb <- new_maker("track_wandb", "tracker")
