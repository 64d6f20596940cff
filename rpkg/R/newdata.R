# The rows that a model is given after its training.

check_newdata <- function(
  newdata,
  features,
  categories = NULL,
  arg = caller_arg(newdata),
  call = caller_env()
) {
  check_no_table(newdata, arg, call)
  if (is.data.frame(newdata)) {
    features <- features %||% names(newdata)
    check_columns(unlist(features), names(newdata), arg, "a feature of the training", call)
    check_frame_features(newdata, features, arg, call, "leave it out", categories)
    newdata <- frame_inputs(newdata, features, categories)
  }
  check_arrays(newdata, arg, call)
  newdata
}
