#' Predict with a trained model
#'
#' @param object A [tfdist_fit].
#' @param newdata Rows in the form in which the model was trained: an array, a list of arrays for a
#'   model of several inputs, or a data frame with the feature columns of the training. Or a
#'   sparklyr table, whose rows stay where they are.
#' @param ... Not used.
#' @param type Which columns to add to a Spark table, as in tidymodels: `"class"` adds
#'   `.pred_class`, `"prob"` a column `.pred_<level>` for each class with the model's number for it
#'   (a probability only if the last layer returns one), `"raw"` the column `.pred` with all numbers
#'   of a row, or `.pred_<output>` for each of several outputs. A model with one number per row, and
#'   one of Keras's binary losses (without `from_logits`), gives the probability of the second
#'   class. `NULL`: class and numbers for such a model, and for one with several numbers per row,
#'   unless its loss shows that they are not classes.
#' @param features,tensors,categories Which columns of a Spark table are used, and how; see
#'   [barrier_train()] and [data_options()]. `NULL`: as in the training, or else all columns.
#' @param batch_size Rows to compute at once; `NULL`: 32, or 256 for a Spark table.
#'
#' @return The model's output, as an array with a row for each row of `newdata`; a list of arrays
#'   for a model of several outputs. The columns are named after the levels of the label, if it was
#'   a factor.
#'
#'   For a Spark table, a `tbl_spark` with all its columns and the predictions, for use with dplyr.
#'   Spark computes it when its rows are needed, and again each time: `dplyr::compute()` keeps them.
#'   It is a temporary view, which exists as long as the connection.
#' @seealso [barrier_predict()], which shares the rows out over several workers.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' digits <- mnist(limit = 640)
#' fit <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' scores <- predict(fit, digits$x_test[1:5, , ] / 255)
#' max.col(scores) - 1
#' digits$y_test[1:5]
predict.tfdist_fit <- function(
  object,
  newdata,
  ...,
  type = NULL,
  features = NULL,
  tensors = NULL,
  categories = NULL,
  batch_size = NULL
) {
  check_dots_empty(...)
  call <- rlang::current_env()
  if (inherits(newdata, "tbl_spark")) {
    return(predict_table(
      object,
      newdata,
      type,
      features,
      tensors,
      categories,
      batch_size,
      call
    ))
  }
  check_only_tables(type = type, features = features, tensors = tensors, categories = categories)
  batch_size <- check_count(batch_size %||% 32L, arg = "batch_size")
  newdata <- check_newdata(newdata, object)
  model <- fit_model(object, call)
  scores <- call_python(
    model$predict,
    as_input(newdata, as_feature_array),
    batch_size = batch_size,
    verbose = 0L,
    call = call
  )
  name_columns(scores, object$levels)
}

name_columns <- function(scores, levels) {
  if (is.matrix(scores) && length(levels) == ncol(scores) && length(levels) > 0L) {
    colnames(scores) <- levels
  }
  scores
}
