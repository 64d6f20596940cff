#' Save checkpoints and resume training
#'
#' `checkpoint()` returns a value for the `checkpoint` argument of [barrier_train()]. The value
#' specifies where and how often the training state is saved. A training run that resumes from
#' there, with `resume = TRUE` or automatically with `restarts`, ends with weights and history that
#' are bit-for-bit identical to those of an uninterrupted run. `load_checkpoint()` returns the saved
#' model.
#'
#' A checkpoint holds the weights, the optimizer's state, the state of each worker's random number
#' generators, callback attributes that are plain data, and the history. It is written in the
#' background, and is either complete or absent. If the newest checkpoint is damaged, the previous
#' one is used. If a worker gets SIGTERM, as happens before a preemption, all workers save one more
#' checkpoint at the same step and exit.
#'
#' @param uri A folder used only by this training run: a path that the machines of all workers
#'   share, or a URI with a scheme that Python's fsspec supports. If all workers run on one machine,
#'   any path works.
#' @param every `"epoch"` (default), a number of steps, or a time such as `"600s"`, `"10min"` or
#'   `"1h"`. The final state is always saved.
#' @param keep Maximum number of checkpoints. Training stops after this many consecutive failed
#'   writes, but never after just one.
#' @param resume `TRUE` resumes from the newest intact checkpoint, or starts from the beginning if
#'   there is none. The call must be the same: a different model, different data or different
#'   settings raise an error, except that `epochs` may be larger. If training resumes between two
#'   epochs, `workers` may also be different.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param model A compiled model with the same structure as the trained one, to load the weights
#'   into. It is required for models that Keras cannot write to a file.
#' @inheritParams model_from_base64
#'
#' @return `checkpoint()` returns an object for [barrier_train()]; `load_checkpoint()` returns a
#'   Keras model. Invalid arguments raise an error of class `tfdist_error_input`.
#' @export
#' @examples
#' checkpoint("run-1", every = "10min", keep = 3)
#' \dontrun{
#' saved <- checkpoint("/shared/run-1")
#' fit <- barrier_train(sc, model, data, workers = 8, checkpoint = saved, restarts = 3)
#' # If this session itself fails, make the same call with `resume = TRUE`:
#' saved <- checkpoint("/shared/run-1", resume = TRUE)
#' fit <- barrier_train(sc, model, data, workers = 8, checkpoint = saved, restarts = 3)
#' model <- load_checkpoint("/shared/run-1")
#' }
checkpoint <- function(uri, every = "epoch", keep = 2, resume = FALSE) {
  check_given()
  check_string(uri)
  fields <- list(
    uri = expand_path(uri),
    every = every,
    keep = keep,
    resume = resume
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

# Python does not expand `~`.
expand_path <- function(uri) if (grepl("://", uri, fixed = TRUE)) uri else path.expand(uri)

# A folder stands for a checkpoint() with its defaults.
check_checkpoint <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (rlang::is_string(x)) {
    return(checkpoint(x))
  }
  if (!is.null(x) && !inherits(x, "tfdist_checkpoint")) {
    abort_expected(x, "a folder or the result of `checkpoint()`", TRUE, arg, call)
  }
  invisible(x)
}
