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
#'
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
  backend <- pybackend()
  view <- call_python(backend$view_tensorboard, folder)
  # Python ends a TensorBoard when nothing refers to it.
  the$boards <- c(the$boards, view)
  rlang::inform(sprintf("TensorBoard of %s: %s", view$folder, view$url))
  if (open) {
    getOption("viewer", utils::browseURL)(view$url)
  }
  invisible(view)
}

board_folder <- function(x, call = caller_env()) {
  if (inherits(x, "tfdist_fit")) {
    if (is.null(x$tensorboard)) {
      abort_input(
        "This training wrote nothing for TensorBoard.",
        i = "Train with `callbacks = track_tensorboard()`.",
        call = call
      )
    }
    return(x$tensorboard)
  }
  if (!is.null(x) && !rlang::is_string(x)) {
    abort_expected(x, "`NULL`, a `tfdist_fit` or a folder", FALSE, "x", call)
  }
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
#'
#' @return An object for `callbacks`.
#' @export
#' @examples
#' track_tensorboard("logs/run1")
track_tensorboard <- new_maker("track_tensorboard", "tracker")
