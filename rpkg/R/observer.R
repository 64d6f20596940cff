#' Observe a training run from this session
#'
#' Pass an observer in the `callbacks` argument of [barrier_train()], together with Keras's own
#' callbacks, which run on the workers. Its R functions run in this session while the workers train.
#' They can plot, log or store the metrics, and can stop training.
#'
#' A function that returns `TRUE` stops training on all workers after the same step: at the end of
#' the epoch, or, within an epoch, at the next exchange of gradients. Any other value is ignored. An
#' error in a function stops training and is raised in this session. Messages are printed
#' immediately, regardless of handlers; warnings are raised after training ends.
#'
#' @details
#' In sessions that join ([join_workers()]), only the functions of the first session are called.
#' With `exchange = parameter_server()`, only `on_epoch_end` is called. On a sparklyr connection, if
#' `model_fn` is set or `data` is an R function, sparklyr starts the workers. They cannot be
#' observed, because `spark_apply()` blocks this session until they end.
#'
#' @param on_epoch_end Function that is called as `on_epoch_end(epoch, logs)` with the number of the
#'   epoch, from 1, and a list of the metrics over all rows, such as `logs$loss`, including
#'   validation metrics. The workers wait until it returns. `NULL`: no function is called.
#' @param on_step_end Function that is called as `on_step_end(step, logs)` a few times a second, not
#'   after every step. `step` is the number of the step in its epoch, from 1. `logs` contains the
#'   metrics over the rows that the first worker has trained on so far in the epoch. The workers do
#'   not wait for this function. `NULL`: no function is called.
#' @return An object for `callbacks`.
#' @export
#' @examples
#' losses <- c()
#' watch <- observer(on_epoch_end = function(epoch, logs) {
#'   losses[epoch] <<- logs$loss
#'   logs$loss < 0.1
#' })
#' watch
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && requireNamespace("keras3")
#' library(keras3)
#' model <- keras_model_sequential(input_shape = 4) |>
#'   layer_dense(3, activation = "softmax") |>
#'   compile("adam", "sparse_categorical_crossentropy")
#' fit <- barrier_train("local", model, iris, label = "Species", epochs = 3, callbacks = watch)
#' losses
observer <- function(on_epoch_end = NULL, on_step_end = NULL) {
  check_observing(on_epoch_end)
  check_observing(on_step_end)
  if (is.null(on_epoch_end) && is.null(on_step_end)) {
    abort_input("`observer()` needs `on_epoch_end`, `on_step_end`, or both.")
  }
  fields <- list(on_epoch_end = on_epoch_end, on_step_end = on_step_end)
  new_options(fields, "tfdist_observer")
}

check_observing <- function(x, arg = caller_arg(x)) {
  check_fits(x, is.function(x) && !is_python(x), "an R function", TRUE, arg)
  taken <- if (!is.null(x)) names(formals(x)) else "..."
  if (length(taken) < 2L && !"..." %in% taken) {
    problem <- "`%s` must take two arguments: write `function(%s, logs)`."
    abort_input(sprintf(problem, arg, observed(arg)))
  }
  invisible(x)
}

# Name of the number that a function of an observer gets.
observed <- function(name) if (name == "on_epoch_end") "epoch" else "step"

is_observer <- function(x) inherits(x, "tfdist_observer")
# Convert observers and trackers to Python's, and leave Keras's callbacks unchanged.
as_python_callbacks <- function(callbacks) {
  convert <- function(callback) {
    if (!is_observer(callback)) {
      return(as_python_setting(callback))
    }
    functions <- Map(as_python_observing, unclass(callback), names(callback))
    call_python(pybackend()$Observer, !!!functions)
  }
  if (!is.null(callbacks)) lapply(callbacks, convert)
}

as_python_observing <- function(f, name) {
  if (is.null(f)) {
    return(NULL)
  }
  # Call it by its name, which errors show.
  names <- c(name, observed(name), "logs")
  observing <- as.call(lapply(names, as.name))
  has_warned <- FALSE
  function(number, logs) {
    values <- rlang::set_names(list(f, number, logs), names)
    answer <- within_python(eval(observing, values))
    if (identical(answer, logical()) && !has_warned) {
      has_warned <<- TRUE
      keep_conditions(warn_no_answer(name, names(logs)))
    }
    isTRUE(answer)
  }
}

# For example a comparison with a metric that is not in `logs`.
warn_no_answer <- function(name, known) {
  rlang::warn(c(
    sprintf("`%s` of the observer returned `logical(0)`, which does not stop the training.", name),
    i = sprintf("`logs` has %s.", list_names(known))
  ))
}
