# The 4th argument of barrier_train(), a formula or a recipe. A formula that only names columns
# selects them, from all data that have columns. Everything else is applied to the data frames of
# the training, and by the fit, which stores it, to all later data frames.

# A column_spec(), from the arguments of a call. `given` are quosures of `label`, `features` and
# `weight`; those that the call leaves out are NULL.
choose_columns <- function(given, formula, data_options, data) {
  is_made <- inherits(data_options, "tfdist_data_options")
  check_fits(data_options, is_made, "made by `data_options()`", TRUE, "data_options")
  check_no_database(data, "data")
  if (inherits(data, "recipe")) {
    abort_input("`data` is a recipe.", i = "Write `barrier_train(sc, model, data_frame, recipe)`.")
  }
  if (is.null(formula)) {
    given$label <- given$label %||% "label"
    chosen <- select_columns(given, data, data_options)
    return(column_spec(chosen$label, chosen$features, chosen$weight, data_options))
  }
  check_formula(formula, given)
  if (inherits(formula, "recipe")) {
    return(recipe_columns(formula, data, data_options))
  }
  weight <- select_columns(list(label = "label", weight = given$weight), data, data_options)
  weight <- check_string(weight$weight, TRUE, "weight")
  formula_columns(formula, data, weight, data_options)
}

# A fit reads later data frames in the same way as those of its training.
check_no_formula <- function(formula, is_fit) {
  if (is_fit && !is.null(formula)) {
    problem <- "`model` is a fit, which knows its columns, so `formula` must be left out."
    abort_input(problem, i = "To choose others, pass its model: `fit$model`.")
  }
}

check_formula <- function(formula, given) {
  is_recipe <- inherits(formula, "recipe")
  fits <- is_recipe || rlang::is_formula(formula)
  check_fits(formula, fits, "a formula such as `y ~ a + b`, or a recipe", TRUE, "formula")
  unused <- c("label", "features", if (is_recipe) "weight")
  is_given <- function(quo) rlang::is_quosure(quo) && !rlang::quo_is_null(quo)
  unused <- unused[vapply(given[unused], is_given, NA)]
  if (length(unused)) {
    what <- if (is_recipe) "The recipe" else "`formula`"
    role <- if (is_recipe) ", by their roles" else ""
    problem <- sprintf("%s names the columns, so `%s` must be left out.", what, unused[[1L]])
    abort_input(problem, i = sprintf("Choose the columns in one of the two%s.", role))
  }
}

# Prepare the rows of a data frame as in the training. Without `with_label`, only the columns of the
# features must exist. With `keeps_missing`, values that cannot be computed are NA.
prepare_rows <- function(preparation, data, arg, with_label = FALSE, keeps_missing = FALSE) {
  check_columns(preparation$variables, names(data), arg, "a feature of the training")
  if (with_label) {
    # Otherwise a variable of this session with that name would be the label.
    label <- preparation$label_variables
    check_columns(label, names(data), arg, "part of the training's label")
  }
  if (inherits(preparation, "tfdist_recipe")) {
    bake_rows(preparation, data, arg, with_label)
  } else {
    apply_formula(preparation, data, arg, with_label, keeps_missing)
  }
}

# Reject data other than data frames, with what to do instead.
check_can_prepare <- function(preparation, data, arg) {
  if (is.null(preparation) || is.data.frame(data)) {
    return(invisible())
  }
  is_table <- inherits(data, "tbl_spark")
  what <- if (is_table) "is a Spark table" else sprintf("is %s", describe(data))
  if (inherits(preparation, "tfdist_recipe")) {
    reason <- "A recipe is R code for data frames"
    advice <- "Fetch the rows with `dplyr::collect()`, or prepare the columns with dplyr's verbs."
  } else {
    reason <- sprintf("The formula computes %s with R, from data frames", preparation$computed)
    advice <- "Add the columns with `dplyr::mutate()` first, and name them in the formula."
  }
  if (!is_table) {
    advice <- "Pass a data frame."
  }
  abort_input(sprintf("%s, and `%s` %s.", reason, arg, what), i = advice)
}

#' Count the input columns of a model
#'
#' Text, factors, formulas and recipes produce more columns than the data have. `tfdist_shape()`
#' counts the columns that [barrier_train()] passes to the model, so that you can build a model for
#' them.
#'
#' @inheritParams barrier_train
#' @param data A data frame.
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
  check_fits(data, is.data.frame(data), "a data frame")
  columns <- choose_columns(named_columns(rlang::current_env()), formula, data_options, data)
  names <- check_frame(data, columns, "data")$feature_names
  counts <- if (is.list(names)) lapply(names, length) else length(names)
  structure(counts, feature_names = names)
}
