#' Count the input columns of a model
#'
#' Text, factors, formulas and recipes make more columns than the data have. `tfdist_shape()` counts
#' the columns that [barrier_train()] passes to the model, so that you can build a model for them.
#'
#' @inheritParams barrier_train
#' @param data A data frame.
#'
#' @return A whole number, for `input_shape` of `keras_model_sequential()`; with `features` for
#'   several inputs, a list of numbers by the names of the inputs. The names of the columns are in
#'   its attribute `feature_names`.
#' @section Errors:
#' Those of [barrier_train()] about columns.
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
  columns <- choose_columns(
    named_columns(call),
    formula,
    data_options,
    data
  )
  names <- check_frame(data, columns, "data", call)$feature_names
  counts <- if (is.list(names)) lapply(names, length) else length(names)
  structure(counts, feature_names = names)
}
