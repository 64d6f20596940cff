#' Scale the learning rate with the number of workers
#'
#' Value for the `scale_lr` argument of [barrier_train()]. A step of N workers covers N times as
#' many rows as a step of one worker. The rate of each step is the optimizer's own rate, as compiled
#' or as set by callbacks, multiplied by a factor. The optimizer's variable does not change, so the
#' trained model and every checkpoint contain the unscaled rate.
#'
#' @param rule `"linear"`: the rate times N (Goyal et al., 2017). `"sqrt"`: the rate times the
#'   square root of N (Krizhevsky, 2014), which suits Adam and similar optimizers.
#' @param warmup_epochs Number of epochs, possibly fractional, over which the rate rises step by
#'   step from the unscaled to the scaled value.
#' @param decay Factors by which the rate is multiplied, as a named vector:
#'   `c("30" = 0.1, "60" = 0.01)`. The name of each factor is the number of completed epochs after
#'   which it applies. `NULL` (default): no decay.
#'
#' @return An object for [barrier_train()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' scale_learning_rate("sqrt", warmup_epochs = 5, decay = c("30" = 0.1, "60" = 0.01))
#' \dontrun{
#' barrier_train(sc, model, data, workers = 8, scale_lr = "linear")
#' }
scale_learning_rate <- function(rule = "linear", warmup_epochs = 0, decay = NULL) {
  # A named list becomes a dict in Python.
  fields <- list(rule = rule, warmup_epochs = warmup_epochs, decay = as_list_or_null(decay))
  new_options(fields, "tfdist_scale_learning_rate")
}

check_scale_lr <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x) || inherits(x, "tfdist_scale_learning_rate")) {
    return(invisible(x))
  }
  if (!rlang::is_string(x, c("linear", "sqrt"))) {
    expected <- "\"linear\", \"sqrt\" or made by `scale_learning_rate()`"
    abort_expected(x, expected, TRUE, arg, call)
  }
  invisible(scale_learning_rate(x))
}
