#' Save checkpoints, resume training and restart workers
#'
#' `recovery()` returns a value for the `recovery` argument of [barrier_train()]: what happens if
#' training is interrupted. With `uri`, the state of training is saved there. A training run that
#' resumes from it, with `resume = TRUE` or automatically with `restarts`, ends with weights and
#' history that are bit-for-bit identical to those of an uninterrupted run. `load_checkpoint()`
#' returns the saved model.
#'
#' A checkpoint holds the weights, the optimizer's state, the state of each worker's random number
#' generators, callback attributes that are plain data, and the history. It is written in the
#' background, and is either complete or absent. If the newest checkpoint is damaged, the previous
#' one is used. If a worker gets SIGTERM, as happens before a preemption, all workers save one more
#' checkpoint at the same step and exit.
#'
#' To resume, the call must be the same: a different model, different data or different settings
#' raise an error, except that `epochs` may be larger. If training resumes between two epochs,
#' `workers` may also be different.
#'
#' @param ... Must be empty: the arguments that follow must be named.
#' @param model A compiled model with the same structure as the trained one, to load the weights
#'   into. It is required for models that Keras cannot write to a file.
#' @inheritParams model_from_base64
#'
#' @return `recovery()` returns an object for [barrier_train()]; `load_checkpoint()` returns a
#'   Keras model. Invalid arguments raise an error of class `tfdist_error_input`.
#' @export
#' @examples
#' recovery("run-1", every = "10min", keep = 3)
#' \dontrun{
#' saved <- recovery("/shared/run-1", restarts = 3)
#' fit <- barrier_train(sc, model, data, workers = 8, recovery = saved)
#' # If this session itself fails, make the same call with `resume = TRUE`:
#' saved <- recovery("/shared/run-1", resume = TRUE, restarts = 3)
#' fit <- barrier_train(sc, model, data, workers = 8, recovery = saved)
#' model <- load_checkpoint("/shared/run-1")
#' }
recovery <- new_maker("recovery")

#' @rdname recovery
#' @export
load_checkpoint <- function(uri, ..., model = NULL, custom_objects = NULL, safe_mode = TRUE) {
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
