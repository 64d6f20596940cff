# R's arrays in Python: element [i + 1, j + 1, k + 1] in R is [i, j, k] in numpy, stored row by row.
# Doubles become float32, which Keras computes in; integers remain int32, and strings text.

check_array <- function(x, arg, call, label = FALSE, text = FALSE) {
  if (is_python(x)) {
    return(invisible(x))
  }
  check_array_type(x, arg, call, label, text)
  if (length(x) == 0L) {
    abort_input(c(sprintf("`%s` is empty.", arg), i = "Pass at least one row."), call = call)
  }
  check_no_missing(x, arg, call)
  invisible(x)
}

check_array_type <- function(x, arg, call, label, text) {
  if (inherits(x, "integer64")) {
    abort_input(
      c(
        sprintf("`%s` contains 64-bit integers (integer64).", arg),
        i = "Convert it with `as.integer()` or `as.numeric()`."
      ),
      call = call
    )
  }
  if (is.factor(x) && label) {
    return(invisible())
  }
  if (is.character(x) && label) {
    abort_input(
      c(sprintf("`%s` contains strings.", arg), i = "Make it a factor: `factor(y)`."),
      call = call
    )
  }
  # is.numeric() is FALSE for factors, dates and times.
  if (text && is.character(x) && length(x) > count_rows(x)) {
    abort_input(
      c(
        sprintf("`%s` has %d strings in a row.", arg, as.integer(length(x) / count_rows(x))),
        i = "Strings are one per row: pass a list of arrays, one for each input of the model."
      ),
      call = call
    )
  }
  if (is.numeric(x) || is.logical(x) || is.raw(x) || (text && is.character(x))) {
    return(invisible())
  }
  expected <- if (label) "a numeric array or a factor" else "a numeric array"
  abort_expected(x, expected, FALSE, arg, call)
}

check_no_missing <- function(x, arg, call) {
  if (anyNA(x)) {
    at <- which(is.na(x))[[1L]]
    where <- if (is.null(dim(x))) at else paste(arrayInd(at, dim(x)), collapse = ", ")
    abort_input(
      c(
        sprintf("`%s` has missing values; the first is element [%s].", arg, where),
        i = "Remove these rows, or fill in the values."
      ),
      call = call
    )
  }
}

count_rows <- function(x) {
  if (is_python(x)) {
    # A Spark DataFrame has no length here.
    return(tryCatch(reticulate::py_len(x), error = function(error) NA_integer_))
  }
  if (is.null(dim(x))) length(x) else dim(x)[[1L]]
}

as_feature_array <- function(x) {
  if (is_python(x)) {
    return(x)
  }
  numpy <- reticulate::import("numpy", convert = FALSE)
  numpy$ascontiguousarray(as_plain_array(x), dtype = feature_dtype(x))
}

feature_dtype <- function(x) {
  switch(typeof(x), integer = "int32", raw = "uint8", character = "str", "float32")
}

# For calls of Keras itself, which takes text as a tensor only, and always one of the same rank.
as_keras_array <- function(x) {
  if (!is.character(x)) {
    return(as_feature_array(x))
  }
  text <- as_feature_array(if (is.null(dim(x))) matrix(x) else x)
  reticulate::import("tensorflow", convert = FALSE)$constant(text)
}

as_label_array <- function(y) {
  if (is_python(y)) {
    return(y)
  }
  if (is.factor(y)) {
    y <- as.integer(y) - 1L
  } else if (is.logical(y)) {
    storage.mode(y) <- "integer"
  }
  as_feature_array(y)
}

# A vector without dimensions becomes an array of one: of length 1, reticulate would make it a
# scalar.
as_plain_array <- function(x) {
  size <- dim(x) %||% length(x)
  # reticulate makes bytes of raw vectors, whatever their dimensions.
  if (is.raw(x)) {
    array(as.integer(x), dim = size)
  } else if (is.object(x) || is.null(dim(x))) {
    array(as.vector(x), dim = size)
  } else {
    x
  }
}

# Arguments for Keras: one array, or a list of several; a named list becomes a dict.
as_input <- function(x, as_array) {
  if (!is.list(x) || is_python(x)) {
    return(as_array(x))
  }
  # Not reticulate::dict(), which replaces a name by the variable of that name if there is one.
  reticulate::r_to_py(lapply(x, as_array))
}
