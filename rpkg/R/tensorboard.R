#' View a training run in TensorBoard
#'
#' Starts TensorBoard on a free port, reachable only from this machine, and opens it in the browser
#' or in RStudio's viewer. It stops when this session ends, or when you call `view$close()`. To
#' watch a run with `tensorboard = TRUE` while it is training, use a second session or
#' `tfdist tensorboard` on the command line.
#'
#' The keras3 and tensorflow packages each have their own `tensorboard()` function, which can show
#' the same folder, `fit$tensorboard`.
#'
#' @param x A [tfdist_fit] from a training run with `tensorboard`, a folder, or a URI. `NULL`
#'   (default): the `logs` folder, to which training runs with `tensorboard = TRUE` write.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param open `TRUE` opens TensorBoard in the browser. The default is `TRUE` only in interactive
#'   sessions.
#'
#' @return The running TensorBoard, a Python object with `url`, `folder` and `close()`, invisibly.
#'   It requires the Python package `tensorboard`.
#' @export
#' @examplesIf FALSE
#' fit <- train_mnist("local", epochs = 5, tensorboard = TRUE)
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
        c(
          "This training wrote nothing for TensorBoard.",
          i = "Train with `tensorboard = TRUE`."
        ),
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

# TRUE, or the folder or URI to write to.
check_tensorboard <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x) || rlang::is_bool(x)) {
    return(invisible(x))
  }
  if (!rlang::is_string(x) || !nzchar(x)) {
    abort_expected(x, "`NULL`, `TRUE`, a folder or a URI", FALSE, arg, call)
  }
  absolute_path(x)
}
