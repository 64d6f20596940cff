# The option objects exchange(), local_steps(), scale_learning_rate(), checkpoint(), resources(),
# data_options(), elastic(), parameter_server(), track_mlflow() and track_wandb(): classed lists.
# Each has a class or a function of the same fields in Python, which checks them: when the object is
# made if Python is already running, otherwise at its first use.

python_option_classes <- c(
  tfdist_exchange = "Exchange",
  tfdist_local_steps = "LocalSteps",
  tfdist_scale_learning_rate = "ScaleLearningRate",
  tfdist_checkpoint = "Checkpoint",
  tfdist_resources = "Resources",
  tfdist_data_options = "DataOptions",
  tfdist_elastic = "Elastic",
  tfdist_parameter_server = "ParameterServer",
  tfdist_median_pruning = "MedianPruning",
  tfdist_successive_halving = "SuccessiveHalving",
  tfdist_track_mlflow = "track_mlflow",
  tfdist_track_wandb = "track_wandb"
)

new_options <- function(fields, class, call = caller_env()) {
  # Python has neither missing values, except NA in `tensors` for any length, nor a name twice.
  for (name in setdiff(names(fields), "tensors")) {
    value <- fields[[name]]
    if ((is.atomic(value) || is.list(value)) && anyNA(unlist(value))) {
      abort_input(sprintf("`%s` must not have missing values.", name), call = call)
    }
    if (!is.null(names(value)) && !has_unique_names(value)) {
      abort_input(sprintf("`%s` must have a different name for each value.", name), call = call)
    }
  }
  made <- structure(fields, class = c(class, "tfdist_options"))
  # Observers hold R functions, which Python gets when the training starts.
  if (!is.null(the$pybackend) && !inherits(made, "tfdist_observer")) {
    as_python_setting(made, call)
  }
  made
}

#' @export
print.tfdist_options <- function(x, ...) {
  cat(sprintf("<%s>\n", class(x)[[1L]]))
  values <- vapply(unclass(x), function(value) paste(deparse(value), collapse = " "), "")
  cat(sprintf("  %s = %s\n", format(names(values)), shorten_each(values)), sep = "")
  invisible(x)
}

shorten_each <- function(texts) vapply(texts, shorten, "", USE.NAMES = FALSE)

# `makers` are the names of the functions that make the expected objects.
check_options <- function(x, makers, arg = caller_arg(x), call = caller_env()) {
  if (!is.null(x) && !inherits(x, paste0("tfdist_", makers))) {
    named <- sprintf("`%s()`", makers)
    others <- toString(named[-length(named)])
    expected <- paste(
      c(if (nzchar(others)) c(others, "or"), named[[length(named)]]),
      collapse = " "
    )
    abort_input(
      c(
        sprintf("`%s` must be `NULL` or made by %s, not %s.", arg, expected, describe(x)),
        i = sprintf("Write for example `%s = %s()`.", arg, makers[[1L]])
      ),
      call = call
    )
  }
  invisible(x)
}

as_python_setting <- function(value, call) {
  if (inherits(value, "tfdist_launcher")) {
    as_python_launcher(value, call)
  } else if (inherits(value, "tfdist_options")) {
    as_python_options(value, call)
  } else {
    null_if_empty(value)
  }
}

as_python_options <- function(options, call) {
  if (is.null(options)) {
    return(NULL)
  }
  fields <- unclass(options)
  if (inherits(options, "tfdist_data_options")) {
    fields <- as_python_data_options(fields)
  }
  class <- pybackend(call)[[python_option_classes[[class(options)[[1L]]]]]]
  do.call(call_python, c(list(class, call = call), fields))
}
