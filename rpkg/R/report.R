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
#'
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
  if (!is_failure && !inherits(x, "tfdist_fit")) {
    abort_expected(
      x,
      "a `tfdist_fit` or the error of a failed worker",
      FALSE,
      "x",
      rlang::current_env()
    )
  }
  check_page_path(path)
  check_string(title, allow_null = TRUE)
  if (is_failure) {
    report_failure(x, path, title)
  } else {
    report_fit(x, path, title)
  }
  invisible(path)
}

report_fit <- function(fit, path, title, call = caller_env()) {
  backend <- pybackend(call)
  # The page notes if the model cannot be read: custom code, or a deleted file.
  model <- tryCatch(fit_model(fit), error = function(error) NULL)
  # Fits that were saved by earlier releases have no record.
  record <- .subset2(fit, "record") %||% encode_fit(fit)
  call_python(backend$bridge$report_record, record, model, path.expand(path), title, call = call)
}

report_failure <- function(error, path, title, call = caller_env()) {
  backend <- pybackend(call)
  call_python(
    backend$bridge$report_failure,
    rank = error$rank,
    host = error$host,
    exception_type = error$exception_type,
    message = conditionMessage(error),
    traceback = error$traceback,
    log = as.list(error$log),
    timeline = lapply(seq_len(NROW(error$timeline)), function(row) {
      moment <- as.list(error$timeline[row, ])
      utils::modifyList(moment, list(time = as.double(moment$time)))
    }),
    path = path.expand(path),
    title = title,
    call = call
  )
}

# The record of a fit that was saved without one, in the format of Python's records.
encode_fit <- function(fit) {
  workers <- lapply(seq_len(nrow(fit$workers)), function(row) {
    worker <- as.list(fit$workers[row, ])
    worker[!vapply(worker, is.na, NA)]
  })
  known <- list(
    history = lapply(fit$history, as.list),
    epochs_of = lapply(epochs_of(fit), as.list),
    workers = workers,
    straggler = unname(fit$straggler),
    metrics = fit$metrics,
    epochs = fit$epochs,
    seconds = fit$seconds,
    seed = fit$seed,
    features = as.list(fit$features),
    levels = as.list(fit$levels),
    model_format = fit$model_format,
    model_sha256 = fit$model_sha256,
    model_uri = fit$model_uri,
    model_bytes = if (nzchar(fit$model_base64)) base64_size(fit$model_base64)
  )
  known <- known[!vapply(known, is.null, NA)]
  as.character(jsonlite::toJSON(known, auto_unbox = TRUE, digits = NA, na = "string"))
}

check_page_path <- function(path, arg = caller_arg(path), call = caller_env()) {
  check_string(path, arg = arg, call = call)
  if (!grepl("[.]html?$", path, ignore.case = TRUE)) {
    abort_input(sprintf("`%s` must end in .html, but is %s.", arg, describe(path)), call = call)
  }
  if (!dir.exists(dirname(path.expand(path)))) {
    abort_input(
      c(
        sprintf("`%s` cannot be written: there is no folder %s.", arg, dirname(path)),
        i = "Create it with `dir.create()`, or name another one."
      ),
      call = call
    )
  }
  invisible(path)
}
