#' Write a report on a training run as an HTML page
#'
#' Writes one HTML page that works offline. It shows the curves of all metrics, the work of each
#' worker with a breakdown of its step times, failures and restarts, and the model, settings and
#' versions. It has a light and a dark mode and adapts to wide and narrow screens. All numbers also
#' appear in tables. For programs, the HTML element `tfdist-run` contains the numbers as JSON.
#'
#' @param x A [tfdist_fit], including one from `readRDS()`. For a failed training run, pass its
#'   error (see [tfdist_error]): the page then shows the failure, its traceback, the last lines that
#'   the worker printed, and what all workers did and when.
#' @param path The file to write, `*.html`.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param title Title of the page. `NULL` (default): the model's name.
#' @return `path`, invisibly. The page lists the parts that are missing from the fit.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' fit <- train_mnist("local", workers = 2, epochs = 2, limit = 640, verbose = 0)
#' report(fit, file.path(tempdir(), "run.html"))
#'
#' \dontrun{
#' tryCatch(
#'   barrier_train(sc, model, data, workers = 8),
#'   tfdist_error_worker_failed = function(error) report(error, "failed.html")
#' )
#' }
report <- function(x, path, ..., title = NULL) {
  check_dots_empty(...)
  is_failure <- inherits(x, "tfdist_error_worker_failed")
  fits <- is_failure || inherits(x, "tfdist_fit")
  check_fits(x, fits, "a `tfdist_fit` or the error of a failed worker")
  check_model_path(path, c("html", "htm"))
  check_string(title, allow_null = TRUE)
  write <- if (is_failure) report_failure else report_fit
  write(x, path.expand(path), title)
  invisible(path)
}

report_fit <- function(fit, path, title) {
  # The page notes if the model cannot be read: custom code, or a deleted file.
  model <- tryCatch(fit_model(fit), error = function(error) NULL)
  call_bridge("report_record", fit$record, model, path, title)
}

report_failure <- function(error, path, title) {
  timeline <- error$timeline
  as_moment <- function(row) {
    utils::modifyList(as.list(timeline[row, ]), list(time = as.double(timeline$time[[row]])))
  }
  fields <- c("rank", "host", "exception_type", "traceback")
  call_bridge(
    "report_failure",
    !!!rlang::set_names(lapply(fields, function(field) error[[field]]), fields),
    message = conditionMessage(error),
    log = as.list(error$log),
    timeline = lapply(seq_len(NROW(timeline)), as_moment),
    path = path,
    title = title
  )
}
