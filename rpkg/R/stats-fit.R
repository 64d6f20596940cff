# A fit for generics of the package stats.

#' Fitted values and residuals of a fit
#'
#' A fit does not contain its training data. `fitted()` and `residuals()` look up the variable that
#' the training call named, or take `data`.
#'
#' @param object A [tfdist_fit].
#' @param data The training data: a data frame or `list(x, y)`. `NULL` (default): the variable that
#'   the training call named.
#' @param ... Must be empty.
#' @return
#' * `fitted()`: the predictions of all rows of `data`, as [predict.tfdist_fit()] returns them; a
#'   vector if there is one number per row;
#' * `residuals()`: numeric labels minus their predictions, as the formula computes the label:
#'   `log(y)` for `log(y) ~ x`. A matrix for `cbind(y, z) ~ x`;
#' * `nobs()`: the number of training rows.
#'
#' Other generics of stats, such as `coef()`, `deviance()`, `AIC()` and `anova()`, raise an error.
#' @exportS3Method stats::fitted
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' digits <- mnist(limit = 640)
#' fit <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' dim(fitted(fit, digits$x_train / 255))
#' nobs(fit)
fitted.tfdist_fit <- function(object, data = NULL, ...) {
  check_dots_empty(...)
  data <- data %||% training_data(object, parent.frame())
  is_pair <- is.list(data) && !is.data.frame(data) && !is_python(data)
  found <- stats::predict(object, if (is_pair) data[[1L]] else data)
  if (identical(names(found), ".pred")) found$.pred else found
}

#' @rdname fitted.tfdist_fit
#' @exportS3Method stats::residuals
residuals.tfdist_fit <- function(object, data = NULL, ...) {
  check_dots_empty(...)
  data <- data %||% training_data(object, parent.frame())
  labels <- numeric_labels(object, data)
  labels - array(unlist(fitted.tfdist_fit(object, data)), dim(labels) %||% length(labels))
}

#' @rdname fitted.tfdist_fit
#' @exportS3Method stats::nobs
nobs.tfdist_fit <- function(object, ...) {
  check_dots_empty(...)
  sum(object$workers$rows)
}

#' @exportS3Method stats::formula
formula.tfdist_fit <- function(x, ...) {
  x$formula %||%
    abort_input(
      "This fit has no formula: none was passed, or it comes from a .json file, which has none."
    )
}

training_data <- function(fit, frame) {
  if (is.null(fit$call$data)) {
    abort_input("This fit does not store its data.", i = "Pass `data`.")
  }
  check_update_known(c(fit$call, sc = "local"), list(), frame)
  eval(fit$call$data, frame)
}

numeric_labels <- function(fit, data) {
  if (is.data.frame(data) && rlang::is_string(fit$label)) {
    if (!is.null(fit$preparation)) {
      data <- prepare_rows(fit$preparation, data, "data", with_label = TRUE)
    }
    check_columns(fit$label, names(data), "data", "the label")
    labels <- data[[fit$label]]
  } else if (is.list(data) && !is.data.frame(data) && length(data) > 1L) {
    labels <- data[[2L]]
  } else {
    check_fits(data, FALSE, "a data frame with one label, or `list(x, y)`")
  }
  if (!is.numeric(labels)) {
    problem <- sprintf("Residuals need numeric labels, but the label is %s.", describe(labels))
    abort_input(problem, i = "`predict()` returns classes and probabilities.")
  }
  labels
}

# The defaults of stats read elements that a fit does not have.
abort_no_method <- function(instead) {
  generic <- name_called()
  problem <- sprintf("There is no applicable method of %s for a tfdist_fit.", generic)
  abort_input(problem, i = instead)
}

use_likelihood <- "A fit has no likelihood. Compare fits by `evaluate()` on validation rows."
use_weights <- "The weights of the model are `fit$model$get_weights()`."
use_history <- "The loss of each epoch is `fit$history$loss`, or use `evaluate()`."
use_formula <- "`formula(fit)` returns the formula, and `fit$features` the feature columns."

#' @exportS3Method stats::coef
coef.tfdist_fit <- function(object, ...) abort_no_method(use_weights)
#' @exportS3Method stats::confint
confint.tfdist_fit <- function(object, parm, level = 0.95, ...) abort_no_method(use_weights)
#' @exportS3Method stats::vcov
vcov.tfdist_fit <- function(object, ...) abort_no_method(use_weights)
#' @exportS3Method stats::logLik
logLik.tfdist_fit <- function(object, ...) abort_no_method(use_likelihood)
#' @exportS3Method stats::AIC
AIC.tfdist_fit <- function(object, ..., k = 2) abort_no_method(use_likelihood)
#' @exportS3Method stats::BIC
BIC.tfdist_fit <- function(object, ...) abort_no_method(use_likelihood)
#' @exportS3Method stats::anova
anova.tfdist_fit <- function(object, ...) abort_no_method(use_likelihood)
#' @exportS3Method stats::weights
weights.tfdist_fit <- function(object, ...) abort_no_method(use_weights)
#' @exportS3Method stats::deviance
deviance.tfdist_fit <- function(object, ...) abort_no_method(use_history)
#' @exportS3Method stats::sigma
sigma.tfdist_fit <- function(object, ...) abort_no_method(use_history)
#' @exportS3Method stats::df.residual
df.residual.tfdist_fit <- function(object, ...) abort_no_method(use_history)
#' @exportS3Method stats::terms
terms.tfdist_fit <- function(x, ...) abort_no_method(use_formula)
#' @exportS3Method stats::model.frame
model.frame.tfdist_fit <- function(formula, ...) abort_no_method(use_formula)
#' @exportS3Method stats::model.matrix
model.matrix.tfdist_fit <- function(object, ...) abort_no_method(use_formula)
