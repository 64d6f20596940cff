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
#'
#' @return An object for [barrier_train()] or [barrier_evaluate()]. Invalid arguments raise an error
#'   of class `tfdist_error_input`.
#' @export
#' @examples
#' data_options(categories = list(color = c("blue", "red")), in_memory = TRUE)
#' data_options(tensors = list(image = list("uint8", c(28, 28))))
data_options <- new_maker("data_options")

# Malformed values are left to Python's checks.
as_python_data_options <- function(fields) {
  fields["tensors"] <- list(lapply(fields$tensors, as_python_tensor))
  categories <- lapply(fields$categories, as_comparable_values)
  fields["categories"] <- list(lapply(categories, as.list))
  fields
}

# NA as the first size: rows of any length.
as_python_tensor <- function(tensor) {
  if (!is.list(tensor) || length(tensor) != 2L) {
    return(tensor)
  }
  list(tensor[[1L]], lapply(tensor[[2L]], function(size) if (!is.na(size)) size))
}

null_if_empty <- function(x) if (length(x)) x

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

has_unique_names <- function(x) {
  length(x) > 0L && rlang::is_named(x) && !anyDuplicated(names(x))
}
