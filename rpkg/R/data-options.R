#' Options for reading and storing rows
#'
#' Value for the `data_options` argument of [barrier_train()] and [barrier_evaluate()].
#'
#' @param tensors Data type and shape of the array in each row of a column, for tables and files, as
#'   a named list: `list(image = list("uint8", c(28, 28)))`. Bytes are read as little-endian, and
#'   arrays in row-major order. `list("int32", NA)` allows rows of any length, which are padded with
#'   zeros to the length of the longest, and `list("float32", c(NA, 3))` rows of any number of
#'   vectors of length 3.
#' @param categories Possible values of columns, as a named list: `list(color = c("blue", "red"))`
#'   encodes them as 0, 1, 2, ... Any other value raises an error.
#' @param tfrecord_spec Features of TFRecord files, as a named vector of `"int64"`, `"float32"`,
#'   `"bytes"` or `"string"`, followed by `"[]"` for lists. `NULL` (default): the description that
#'   [write_tfrecords()] writes next to the files or, if there is none, the types in the first
#'   records.
#' @param encode Encoding of feature columns that contain text or factors or have `categories`.
#'   `"one_hot"`: one number per value, 1 if the row has that value, else 0. `"integer"`: the code
#'   of the value, for an embedding. To choose an encoding for each column, pass a named vector such
#'   as `c(color = "integer", year = "one_hot")`, which may also name columns of whole numbers.
#'   `NULL` (default): text and factors are one-hot encoded, and columns with `categories` become
#'   codes. A text column of a table or files is passed to the model as strings if it is the only
#'   column of an input; so is a character column of a data frame if `model` has a string input for
#'   it. Without `categories`, the values are a factor's levels, or the sorted values in the
#'   training data.
#' @param repartition `FALSE` uses a table's existing partitions (there must be exactly `workers` of
#'   them) and gives each worker one contiguous range of the rows in files. Reading is then faster,
#'   but if the rows are sorted, the workers get different classes.
#' @param in_memory `TRUE`: workers hold their rows in memory, if the rows fit into half of the free
#'   memory. `FALSE` (default): all rows are stored on disk, and memory use does not grow with the
#'   number of rows.
#'
#' @return An object for [barrier_train()] or [barrier_evaluate()]. Invalid arguments raise an error
#'   of class `tfdist_error_input`.
#' @export
#' @examples
#' data_options(categories = list(color = c("blue", "red")), in_memory = TRUE)
#' data_options(tensors = list(image = list("uint8", c(28, 28))))
data_options <- function(
  tensors = NULL,
  categories = NULL,
  tfrecord_spec = NULL,
  encode = NULL,
  repartition = TRUE,
  in_memory = FALSE
) {
  fields <- list(
    tensors = check_tensors(tensors),
    categories = check_categories(categories),
    tfrecord_spec = as_list_or_null(tfrecord_spec),
    encode = check_encode(encode),
    repartition = check_flag(repartition),
    in_memory = check_flag(in_memory)
  )
  new_options(fields, "tfdist_data_options")
}

as_python_data_options <- function(fields) {
  fields$tensors <- lapply(fields$tensors, as_python_tensor)
  fields$categories <- lapply(fields$categories, as.list)
  if (!is.null(names(fields$encode))) {
    fields$encode <- as.list(fields$encode)
  }
  lapply(fields, null_if_empty)
}

as_python_tensor <- function(tensor) {
  sizes <- lapply(tensor[[2L]], function(size) if (!is.na(size)) as.integer(size))
  list(tensor[[1L]], sizes)
}

null_if_empty <- function(x) if (length(x)) x

numpy_types <- c(
  c("bool", "int8", "int16", "int32", "int64"),
  c("uint8", "uint16", "uint32", "uint64"),
  c("float16", "float32", "float64")
)

check_tensors <- function(x, arg = caller_arg(x), call = caller_env()) {
  example <- "a named list such as `list(image = list(\"uint8\", c(28, 28)))`"
  check_named_list(x, example, arg, call)
  for (name in names(x)) {
    check_tensor(x[[name]], sprintf("%s$%s", arg, name), call)
  }
  invisible(x)
}

check_tensor <- function(x, arg, call) {
  if (!is.list(x) || length(x) != 2L) {
    expected <- "a list of type and shape such as `list(\"uint8\", c(28, 28))`"
    abort_expected(x, expected, FALSE, arg, call)
  }
  check_one_of(x[[1L]], numpy_types, arg = sprintf("%s[[1]]", arg), call = call)
  shape <- x[[2L]]
  # NA as the first size: rows of any length.
  sizes <- if (length(shape) && is.na(shape[[1L]])) shape[-1L] else shape
  is_sizes <- length(sizes) == 0L || (rlang::is_integerish(sizes, finite = TRUE) && all(sizes > 0))
  if (!is_sizes) {
    expected <- "whole numbers of at least 1, the first of which may be `NA` for rows of any length"
    abort_expected(shape, expected, FALSE, sprintf("%s[[2]]", arg), call)
  }
}

check_categories <- function(x, arg = caller_arg(x), call = caller_env()) {
  check_named_list(x, "a named list such as `list(color = c(\"blue\", \"red\"))`", arg, call)
  for (name in names(x)) {
    values <- x[[name]]
    if (!is.atomic(values) || length(values) == 0L || anyNA(values) || anyDuplicated(values)) {
      expected <- "a vector of one or more distinct values, none of them missing"
      abort_expected(values, expected, FALSE, sprintf("%s$%s", arg, name), call)
    }
  }
  invisible(if (!is.null(x)) lapply(x, as_comparable_values))
}

check_encode <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x)) {
    return(invisible(NULL))
  }
  values <- unlist(x)
  is_known <- is.character(values) && all(values %in% c("one_hot", "integer"))
  if (!is_known || !(rlang::is_string(values) || has_unique_names(x))) {
    expected <- "\"one_hot\", \"integer\", or a vector of these by column"
    abort_expected(x, expected, TRUE, arg, call)
  }
  invisible(values)
}

# Values in the type in which Python compares them with a column: there, 3 does not match 3.0.
as_comparable_values <- function(values) {
  if (is.factor(values)) {
    as.character(values)
  } else if (is.double(values) && rlang::is_integerish(values)) {
    as.integer(values)
  } else {
    as.vector(values)
  }
}

check_named_list <- function(x, expected, arg, call) {
  if (!is.null(x) && !(is.list(x) && has_unique_names(x))) {
    abort_expected(x, expected, TRUE, arg, call)
  }
}

has_unique_names <- function(x) {
  length(x) > 0L && rlang::is_named(x) && !anyDuplicated(names(x))
}
