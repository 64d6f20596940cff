#' Predict with a trained model
#'
#' @param object A [tfdist_fit].
#' @param newdata Rows in the same form as the training data: a data frame with the feature columns
#'   used in training, an array, or a list of arrays for a model with several inputs. It can also be
#'   a sparklyr table, whose rows stay in Spark.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param type Type of the predictions, with the names used in tidymodels:
#'   * `"class"`: the `.pred_class` column;
#'   * `"prob"`: a `.pred_<level>` column for each class, with its probability. If the model uses a
#'     Keras loss with `from_logits`, this is the softmax or sigmoid of the output. Raises an error
#'     if the model's outputs are not probabilities. For a model with one number per row and a
#'     binary Keras loss, it is the probability of the second class;
#'   * `"raw"`: the model's raw outputs, as an array. For a Spark table, they are in the `.pred`
#'     column, or in one `.pred_<output>` column for each of several outputs;
#'   * `NULL` (default): `"raw"` for arrays. For data frames and tables, the columns depend on the
#'     model. A classifier returns the class and, if its outputs are probabilities, the
#'     probabilities, too. Any other model, such as one for regression, returns `.pred`. If the
#'     label was a matrix with column names, as from `cbind(mpg, hp) ~ wt`, it returns `.pred_mpg`
#'     and `.pred_hp`. A model with several outputs returns `.pred_<output>` for each, or, if the
#'     label of the output was a factor, `.pred_<output>_class` and `.pred_<output>_<level>`. For a
#'     Spark table, each of several outputs is a number or an array.
#' @param features,tensors,categories Columns of a Spark table to use, and their options; see
#'   [barrier_train()] and [data_options()]. `NULL` (default): as in training or, if the fit has no
#'   feature columns, all columns.
#' @param on_missing How to handle a row that has a missing or infinite value, or a value outside
#'   its column's categories. `"null"` (default): its predictions are `NA` (`NULL` in Spark).
#'   `"error"` raises an error.
#' @param batch_size Number of rows to compute at once. `NULL` (default): 32, or 256 for a Spark
#'   table.
#' @param runtime What computes the predictions of a Spark table. `"keras"` needs TensorFlow and
#'   Keras on the executors. `"onnx"`, ONNX Runtime, needs only the Python package onnxruntime
#'   there: it starts sooner, needs less memory, and computes on the CPU. The model is converted in
#'   this session, which needs `install_tfdist(extras = c("cpu", "onnx"))`, and compared with Keras
#'   on random rows; see [write_model()]. `NULL` (default): `"keras"`.
#' @return
#' * For types other than `"raw"`: a tibble (or a data frame, if the tibble package is not
#'   installed) with one row for each row of `newdata`, in the same order. `.pred_class` is a
#'   factor, ordered if the label was. If an output has several numbers per row without names, its
#'   column is a matrix.
#' * `"raw"`: an array with a row for each row of `newdata`; a list of arrays for a model with
#'   several outputs. Its columns are named after the levels of the label, if it was a factor, or
#'   after the label's columns.
#' * For a Spark table: a `tbl_spark` with all columns of `newdata` and the predictions, for use
#'   with dplyr. Spark evaluates it lazily and recomputes it each time you use it;
#'   `dplyr::compute()` stores the rows. It is a temporary view that exists until the connection is
#'   closed.
#' @seealso [barrier_predict()], which distributes the rows over several workers;
#'   `generics::augment()`, which adds the predictions to the rows.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' digits <- mnist(limit = 640)
#' fit <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' images <- digits$x_test[1:5, , ] / 255
#' dim(predict(fit, images))
#' predict(fit, images, type = "class")
#' digits$y_test[1:5]
predict.tfdist_fit <- function(
  object,
  newdata,
  ...,
  type = NULL,
  features = NULL,
  tensors = NULL,
  categories = NULL,
  on_missing = "null",
  batch_size = NULL,
  runtime = NULL
) {
  check_dots_empty(...)
  check_one_of(type, c("class", "prob", "raw"), allow_null = TRUE)
  check_one_of(runtime, c("keras", "onnx"), allow_null = TRUE)
  columns <- list(features = features, tensors = tensors, categories = categories)
  if (inherits(newdata, "tbl_spark")) {
    return(predict_table(object, newdata, type, columns, on_missing, batch_size, runtime))
  }
  check_only_tables(c(columns, list(runtime = runtime)))
  batch_size <- check_count(batch_size %||% 32L, arg = "batch_size")
  checked <- check_newdata(newdata, object, on_missing)
  rows <- as_input(checked$rows, as_feature_array)
  model <- fit_model(object)
  scores <- call_bridge("predict_rows", model, rows, batch_size)
  shape_scores(scores, object, checked$complete, type, newdata)
}

# The model's numbers for the complete rows of `newdata`, in the form that `type` asks for.
shape_scores <- function(scores, model, complete, type, newdata) {
  is_fit <- inherits(model, "tfdist_fit")
  if (!shows_columns(type, newdata)) {
    scores <- spread_rows(scores, complete)
    return(if (is_fit) name_scores(scores, model) else scores)
  }
  fit <- if (is_fit) model else list()
  as_columns(scores, fit, if (is_fit) fit_model(model) else model, complete, type)
}

# Whether predictions are columns, not the raw outputs.
shows_columns <- function(type, newdata) {
  !identical(type %||% if (!is.data.frame(newdata)) "raw", "raw")
}

# The columns that a Spark table would get; for several outputs, also classes.
as_columns <- function(scores, fit, model, complete, type) {
  outputs <- c(character(), union(names(.subset2(fit, "labels")), names(fit$label)))
  levels_of <- lapply(rlang::set_names(outputs), function(name) label_of(fit, name)$levels)
  levels_of <- if (is.null(type)) lapply(Filter(length, levels_of), as.list)
  levels <- as_list_or_null(fit$levels)
  found <- call_bridge("shape_columns", model, scores, type, levels, levels_of)
  name_one <- function(one, name) name_output(one, name, label_of(fit, name))
  columns <- Map(name_one, found, names(found))
  as_rows(lapply(do.call(c, unname(columns)), spread_rows, complete))
}

# What is known of the label of an output; "" is the only one.
label_of <- function(fit, output) {
  labels <- .subset2(fit, "labels")
  if (!nzchar(output)) {
    label <- if (is.null(names(labels))) unlist(labels, recursive = FALSE)
    return(replace(as.list(label), "levels", list(fit$levels)))
  }
  label <- labels[[output]]
  column <- as.list(fit$label)[[output]]
  label$levels <- label$levels %||% if (!is.null(column)) fit$categories[[column]]
  label
}

# The columns of one output, whose name follows `.pred` if there are several.
name_output <- function(found, output, label) {
  columns <- lapply(found$columns, as_column)
  names <- as.character(unlist(found$names))
  if (!is.null(found$levels)) {
    levels <- as.character(unlist(found$levels))
    # The code of a class that is not known is -1.
    codes <- ifelse(columns[[1L]] < 0L, NA, columns[[1L]] + 1L)
    columns[[1L]] <- factor(levels[codes], levels, ordered = isTRUE(label$ordered))
  } else if (is.matrix(columns[[1L]]) && ncol(columns[[1L]]) == length(label$columns)) {
    names <- paste0(".pred_", label$columns)
    columns <- lapply(seq_along(names), function(i) columns[[1L]][, i])
  }
  if (nzchar(output)) {
    names <- paste0(".pred_", output, substring(names, nchar(".pred") + 1L))
  }
  rlang::set_names(columns, names)
}

as_column <- function(numbers) {
  size <- dim(numbers)
  if (length(size) < 2L || prod(size[-1L]) == 1L) as.vector(numbers) else numbers
}

# A tibble, or a data frame without that package.
as_rows <- function(
  columns,
  rows = NROW(columns[[1L]]),
  has_tibble = requireNamespace("tibble", quietly = TRUE)
) {
  if (has_tibble) {
    return(tibble::new_tibble(columns, nrow = rows))
  }
  structure(columns, class = "data.frame", row.names = .set_row_names(rows))
}

# The model's numbers, with the names of their columns.
name_scores <- function(scores, fit) {
  name_one <- function(numbers, output) {
    label <- label_of(fit, output)
    name_columns(numbers, label$levels %||% label$columns)
  }
  if (is.list(scores) && !is.null(names(scores))) {
    return(Map(name_one, scores, names(scores)))
  }
  if (is.list(scores)) scores else name_one(scores, "")
}

name_columns <- function(scores, levels) {
  if (is.matrix(scores) && length(levels) == ncol(scores) && length(levels) > 0L) {
    colnames(scores) <- levels
  }
  scores
}
