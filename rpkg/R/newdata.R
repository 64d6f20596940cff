# The rows that a model is given after its training, as the arrays of its inputs. `model` is a fit,
# by which data frames are prepared and encoded as those of the training, or another model.
check_newdata <- function(newdata, model, arg = caller_arg(newdata), call = caller_env()) {
  # The text of the argument, as long as it is one.
  force(arg)
  check_no_table(newdata, arg, call)
  if (is.data.frame(newdata)) {
    newdata <- encode_newdata(newdata, model, arg, call)
  }
  check_arrays(newdata, arg, call, text = TRUE)
  arrays <- if (is.list(newdata) && !is_python(newdata)) newdata else list(newdata)
  has_inputs <- is_python(model) || inherits(model, "tfdist_fit")
  if (has_inputs && any(vapply(arrays, is.character, NA))) {
    inputs <- find_text_inputs(as_python_model(model, call), call)
    if (!is.null(inputs) && length(inputs) == 0L) {
      abort_input(
        sprintf("`%s` contains strings, but no input of the model takes strings.", arg),
        call = call
      )
    }
  }
  newdata
}

# The names of a model's inputs that take strings; NULL if its inputs are not known.
find_text_inputs <- function(model, call) {
  call_python(pybackend(call)$bridge$find_text_inputs, model, call = call)
}

encode_newdata <- function(newdata, model, arg, call) {
  if (!is.null(preparation <- fit_field(model, "preparation"))) {
    newdata <- prepare_rows(preparation, newdata, arg, call)
  }
  features <- fit_field(model, "features") %||% names(newdata)
  categories <- fit_field(model, "categories")
  check_columns(unlist(features), names(newdata), arg, "a feature of the training", call)
  coded <- list(categories = categories, encode = fit_field(model, "encode"))
  check_frame_features(newdata, features, arg, call, coded, "leave it out")
  frame_inputs(newdata, features, categories, coded$encode)
}
