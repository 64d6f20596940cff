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

#' View a training run in TensorBoard
#'
#' Starts TensorBoard on a free port, reachable only from this machine, and opens it in the browser
#' or in RStudio's viewer. It stops when this session ends, or when you call `view$close()`. To
#' watch a run with [track_tensorboard()] while it is training, use a second session or
#' `tfdist tensorboard` on the command line.
#'
#' The keras3 and tensorflow packages each have their own `tensorboard()` function, which can show
#' the same folder, `fit$tensorboard`.
#'
#' @param x A [tfdist_fit] from a training run with `track_tensorboard()`, a folder, or a URI.
#'   `NULL` (default): the `logs` folder, to which training runs with `track_tensorboard()` write.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param open `TRUE` opens TensorBoard in the browser. The default is `TRUE` only in interactive
#'   sessions.
#' @return The running TensorBoard, a Python object with `url`, `folder` and `close()`, invisibly.
#'   It requires the Python package `tensorboard`.
#' @export
#' @examplesIf FALSE
#' fit <- train_mnist("local", epochs = 5, callbacks = track_tensorboard())
#' view <- view_tensorboard(fit)
#' view$close()
view_tensorboard <- function(x = NULL, ..., open = interactive()) {
  check_dots_empty(...)
  check_flag(open)
  folder <- board_folder(x)
  view <- call_python(pybackend()$view_tensorboard, folder)
  # Python ends a TensorBoard when nothing refers to it.
  the$boards <- c(the$boards, view)
  rlang::inform(sprintf("TensorBoard of %s: %s", view$folder, view$url))
  if (open) {
    getOption("viewer", utils::browseURL)(view$url)
  }
  invisible(view)
}

board_folder <- function(x) {
  if (inherits(x, "tfdist_fit")) {
    if (is.null(x$tensorboard)) {
      problem <- "This training wrote nothing for TensorBoard."
      abort_input(problem, i = "Train with `callbacks = track_tensorboard()`.")
    }
    return(x$tensorboard)
  }
  check_fits(x, is.null(x) || rlang::is_string(x), "`NULL`, a `tfdist_fit` or a folder")
  if (!is.null(x)) expand_path(x)
}

#' Write event files for TensorBoard
#'
#' Pass the result in the `callbacks` argument of [barrier_train()]. The files contain the metrics
#' of each epoch, the metrics over the first worker's rows every 50 steps, and the graph. On any
#' cluster, the first worker sends them to this session at the end of each epoch and every 10
#' seconds. See [view_tensorboard()] and the `tensorboard` element of the fit. For a profile, pass a
#' `keras3::callback_tensorboard()` instead.
#'
#' @param folder Folder on this machine, or a URI that TensorFlow can write to: then the worker
#'   writes there directly. `NULL` (default): a new folder in `logs` for each training run. Each
#'   trial of [train_many()] has a folder in it: `trial-1` and so on.
#' @return An object for `callbacks`.
#' @export
#' @examples
#' track_tensorboard("logs/run1")
track_tensorboard <- new_maker("track_tensorboard", "tracker")

# Runs of tfruns: they get the same metadata as from keras3's fit() and evaluate(), for ls_runs().

# keras3 loads tfruns, and so does the start of a run.
is_run_active <- function() isNamespaceLoaded("tfruns") && tfruns::is_run_active()

record_training <- function(fit) {
  if (!is_run_active()) {
    return(fit)
  }
  wide <- wide_history(fit)
  tfruns::write_run_metadata("metrics", wide[names(wide) != "epoch"])
  # A model that cannot be read here must not make the training fail.
  described <- tryCatch(describe_model(fit_model(fit)), error = function(error) NULL)
  counts <- list(samples = sum(fit$workers$rows), workers = nrow(fit$workers))
  properties <- c(counts, fit$settings[c("epochs", "batch_size")], described)
  tfruns::write_run_metadata("properties", drop_null(properties))
  if (length(fit$metrics)) {
    record_evaluation(rlang::set_names(fit$metrics, sub("^test_", "", names(fit$metrics))))
  }
  fit
}

record_evaluation <- function(figures) {
  if (is_run_active()) {
    tfruns::write_run_metadata("evaluation", as.list(unlist(figures)))
  }
  figures
}

describe_model <- function(model) {
  loss <- model$loss
  if (is_python(loss)) {
    loss <- if (reticulate::py_has_attr(loss, "name")) loss$name else loss$`__name__`
  }
  list(
    model = reticulate::py_capture_output(model$summary(line_length = 80L)),
    loss_function = if (rlang::is_string(loss)) loss,
    optimizer = model$optimizer$name,
    learning_rate = as.double(model$optimizer$learning_rate$numpy())
  )
}
