#' Count the input columns of a model
#'
#' Text, factors, formulas and recipes produce more columns than the data have. `tfdist_shape()`
#' counts the columns that [barrier_train()] passes to the model, so that you can build a model for
#' them.
#'
#' @inheritParams barrier_train
#' @param data A data frame.
#'
#' @return A whole number for the `input_shape` argument of `keras_model_sequential()`. If
#'   `features` describes several inputs, a list of numbers, named after the inputs. The
#'   `feature_names` attribute contains the names of the columns.
#' @section Errors:
#' The same errors about columns that [barrier_train()] raises.
#' @seealso [barrier_train()], whose fit has `feature_names`, too.
#' @export
#' @examples
#' tfdist_shape(iris, Sepal.Length ~ .)
#' tfdist_shape(mtcars, mpg ~ log(disp) + factor(gear) * hp)
tfdist_shape <- function(
  data,
  formula = NULL,
  ...,
  label = "label",
  features = NULL,
  weight = NULL,
  data_options = NULL
) {
  check_dots_empty(...)
  call <- rlang::current_env()
  if (!is.data.frame(data)) {
    abort_expected(data, "a data frame", FALSE, "data", call)
  }
  columns <- choose_columns(named_columns(call), formula, data_options, data)
  names <- check_frame(data, columns, "data", call)$feature_names
  counts <- if (is.list(names)) lapply(names, length) else length(names)
  structure(counts, feature_names = names)
}
