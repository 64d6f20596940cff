# The rows that a model is given after its training, as the arrays of its inputs. `model` is a fit,
# by which data frames are prepared and encoded as those of the training, or another model.
check_newdata <- function(newdata, model, arg = caller_arg(newdata), call = caller_env()) {
  # The text of the argument, as long as it is one.
  force(arg)
  check_no_table(newdata, arg, call)
  if (is.data.frame(newdata)) {
    newdata <- encode_newdata(newdata, model, arg, call)
  }
  check_arrays(newdata, arg, call)
  newdata
}

encode_newdata <- function(newdata, model, arg, call) {
  if (!is.null(preparation <- fit_field(model, "preparation"))) {
    newdata <- prepare_rows(preparation, newdata, arg, call)
  }
  features <- fit_field(model, "features") %||% names(newdata)
  categories <- fit_field(model, "categories")
  check_columns(unlist(features), names(newdata), arg, "a feature of the training", call)
  check_frame_features(newdata, features, arg, call, "leave it out", categories)
  frame_inputs(newdata, features, categories, fit_field(model, "encode"))
}
