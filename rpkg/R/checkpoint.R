#' Keep a training, and go on after a worker was lost
#'
#' `checkpoint()` is for the argument `checkpoint` of [barrier_train()]: where and how often the
#' state of the training is written. A training that goes on from there, with `resume = TRUE` or by
#' itself with `restarts`, ends with the weights and the history, bit for bit, of one that was not
#' interrupted. `load_checkpoint()` returns the model as it was kept.
#'
#' A checkpoint holds the weights, the optimizer's state, each worker's random generators, what
#' callbacks keep in attributes of plain data, and the history. It is written beside the training,
#' and is complete or not there at all. A damaged one is passed over for the one before it. If a
#' worker is told to end by SIGTERM, as before a preemption, all workers keep one more checkpoint,
#' of the same step, and leave.
#'
#' @param uri A folder of this training's own: a path that the machines of all workers share, or a
#'   URI with a scheme that Python's fsspec knows. On one machine any path will do.
#' @param every `"epoch"`, a number of steps, or a time such as `"600s"`, `"10min"` or `"1h"`. The
#'   end of the training is always kept.
#' @param keep How many checkpoints there are at most; after as many failures in a row to write one
#'   (at least two), the training ends.
#' @param ... Must be empty: the arguments that follow are given by name.
#' @param model For models that Keras writes no file of: a compiled model like the one that was
#'   trained, which gets the weights.
#' @inheritParams model_from_base64
#'
#' @return `checkpoint()` an object for [barrier_train()]; `load_checkpoint()` a Keras model. Bad
#'   arguments are an error of class `tfdist_error_input`.
#' @export
#' @examples
#' checkpoint("run-1", every = "10min", keep = 3)
#' \dontrun{
#' kept <- checkpoint("/shared/run-1")
#' fit <- barrier_train(sc, model, data, workers = 8, checkpoint = kept, restarts = 3)
#' # After this session itself was lost, the same call:
#' fit <- barrier_train(sc, model, data, workers = 8, checkpoint = kept, resume = TRUE)
#' model <- load_checkpoint("/shared/run-1")
#' }
checkpoint <- function(uri, every = "epoch", keep = 2) {
  check_string(uri)
  fields <- list(
    uri = expand_path(uri),
    every = check_every(every),
    keep = check_count(keep)
  )
  new_options(fields, "tfdist_checkpoint")
}

#' @rdname checkpoint
#' @export
load_checkpoint <- function(
  uri,
  ...,
  model = NULL,
  custom_objects = NULL,
  safe_mode = TRUE
) {
  check_dots_empty(...)
  check_string(uri)
  if (!is.null(model)) {
    check_model_object(model)
  }
  check_custom_objects(custom_objects)
  check_flag(safe_mode)
  backend <- pybackend()
  call_python(
    backend$load_checkpoint,
    expand_path(uri),
    model = if (!is.null(model)) as_python_model(model, rlang::current_env()),
    custom_objects = custom_objects,
    safe_mode = safe_mode
  )
}

# Python knows no `~`.
expand_path <- function(uri) if (grepl("://", uri, fixed = TRUE)) uri else path.expand(uri)

check_every <- function(x, arg = caller_arg(x), call = caller_env()) {
  is_count <- is_number(x) && x >= 1 && x <= .Machine$integer.max && x == trunc(x)
  is_text <- rlang::is_string(x) && grepl("^(epoch|[0-9]+([.][0-9]+)? ?(s|min|h))$", x)
  if (!is_count && !is_text) {
    expected <- "\"epoch\", a number of steps, or a time such as \"600s\", \"10min\" or \"1h\""
    abort_expected(x, expected, FALSE, arg, call)
  }
  invisible(if (is_count) as.integer(x) else x)
}

# A folder by itself is a checkpoint() with its defaults.
check_checkpoint <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (rlang::is_string(x)) {
    return(checkpoint(x))
  }
  if (!is.null(x) && !inherits(x, "tfdist_checkpoint")) {
    abort_expected(x, "a folder or what `checkpoint()` returns", TRUE, arg, call)
  }
  invisible(x)
}

check_can_resume <- function(settings, call = caller_env()) {
  if (settings$resume && is.null(settings$checkpoint)) {
    abort_input(
      c(
        "`resume` needs `checkpoint`.",
        i = "Name the folder to resume from, for example `checkpoint = \"run-1\"`."
      ),
      call = call
    )
  }
}
