# Check rows for a trained model. Returns `rows`, the arrays of its inputs, and `complete`, TRUE for
# each row of `newdata` that is among them. If `model` is a fit, data frames are prepared and
# encoded as in its training.
check_newdata <- function(newdata, model, on_missing = "error", arg = caller_arg(newdata)) {
  # The expression of `newdata`, before its value changes.
  force(arg)
  check_one_of(on_missing, c("null", "error"), arg = "on_missing")
  check_no_table(newdata, arg)
  check_no_database(newdata, arg, predicts = TRUE)
  check_fits(newdata, !is.null(newdata), "a data frame or a numeric array", FALSE, arg)
  complete <- NULL
  if (is.data.frame(newdata)) {
    check_frame_names(newdata, arg)
    newdata <- encode_newdata(newdata, model, on_missing, arg)
    complete <- newdata$complete
    newdata <- newdata$rows
  } else {
    newdata <- order_columns(newdata, fit_field(model, "feature_names"), arg)
  }
  if (on_missing == "null" && is.null(complete) && has_rows_of_r(newdata)) {
    complete <- complete_rows(newdata)
    newdata <- if (all(complete)) newdata else take_rows(newdata, complete)
  }
  check_arrays(newdata, arg, text = TRUE, may_be_empty = !is.null(complete))
  arrays <- if (is_r_list(newdata)) newdata else list(newdata)
  has_inputs <- is_python(model) || inherits(model, "tfdist_fit")
  if (has_inputs && any(vapply(arrays, is.character, NA))) {
    inputs <- find_text_inputs(as_python_model(model))
    if (!is.null(inputs) && length(inputs) == 0L) {
      problem <- sprintf("`%s` contains strings, but no input of the model takes strings.", arg)
      abort_input(problem, i = if (is_paths(newdata)) "Read files first, and pass a data frame.")
    }
  }
  list(rows = newdata, complete = complete)
}

# TRUE if missing values can be found: arrays of numbers with the same number of rows.
has_rows_of_r <- function(x) {
  arrays <- if (is_r_list(x)) x else list(x)
  is_number <- function(array) !is_python(array) && (is.numeric(array) || is.logical(array))
  length(arrays) > 0L &&
    all(vapply(arrays, is_number, NA)) &&
    length(unique(vapply(arrays, count_rows, 1L))) == 1L
}

# Predictions of all rows from those of the complete rows, with NA for the others.
spread_rows <- function(scores, complete) {
  if (is.null(complete) || all(complete)) {
    return(scores)
  }
  take_rows(scores, ifelse(complete, cumsum(complete), NA_integer_))
}

# The names of a model's inputs that take strings; NULL if its inputs are not known.
find_text_inputs <- function(model) call_bridge("find_text_inputs", model)

encode_newdata <- function(newdata, model, on_missing, arg) {
  keeps_missing <- on_missing == "null"
  if (!is.null(preparation <- fit_field(model, "preparation"))) {
    newdata <- prepare_rows(preparation, newdata, arg, keeps_missing = keeps_missing)
  }
  features <- fit_field(model, "features") %||% names(newdata)
  categories <- fit_field(model, "categories")
  check_columns(unlist(features), names(newdata), arg, "a feature of the training")
  coded <- list(categories = categories, encode = fit_field(model, "encode"))
  complete <- if (keeps_missing) complete_cases(newdata, features, categories)
  if (keeps_missing && !all(complete)) {
    newdata <- take_rows(newdata, complete)
  }
  check_frame_features(newdata, features, arg, coded, "leave it out")
  check_finite(newdata, features, arg)
  rows <- frame_inputs(newdata, features, categories, coded$encode)
  if (any(vapply(unlist(features), function(name) NCOL(newdata[[name]]) > 1L, NA))) {
    # The columns of a matrix within a data frame have names of their own.
    names <- name_numbers(newdata, features, categories, coded$encode)
    rows <- if (is.list(rows)) Map(`colnames<-`, rows, names) else `colnames<-`(rows, names)
    rows <- order_columns(rows, fit_field(model, "feature_names"), arg)
  }
  list(rows = rows, complete = complete)
}
