# R's arrays in Python: element [i + 1, j + 1, k + 1] in R is [i, j, k] in numpy, stored row by row.
# Doubles become float32, which Keras computes in; integers remain int32, and strings text.

check_array <- function(x, arg, label = FALSE, text = FALSE, may_be_empty = FALSE) {
  if (is_python(x)) {
    return(invisible(x))
  }
  check_array_type(x, arg, label, text)
  if (length(x) == 0L && !(may_be_empty && count_rows(x) == 0L)) {
    abort_input(sprintf("`%s` is empty.", arg), i = "Pass at least one row.")
  }
  check_no_missing(x, arg)
  check_characters(x, arg)
  invisible(x)
}

# Reject text that is not valid in its encoding, as from a file that was read with a wrong one.
check_characters <- function(x, arg) {
  if (!is.factor(x) && !is.character(x)) {
    return(invisible(x))
  }
  texts <- if (is.factor(x)) levels(x) else x
  bad <- which(!validEnc(texts) | Encoding(texts) == "bytes")
  if (!length(bad)) {
    return(invisible(x))
  }
  text <- texts[[bad[[1L]]]]
  row <- if (is.factor(x)) match(text, x) else bad[[1L]]
  shown <- encodeString(iconv(text, "latin1", "ASCII", sub = "byte"), quote = "\"")
  problem <- "`%s` has text that is not valid in its encoding, first in row %d: %s."
  abort_input(
    sprintf(problem, arg, row, shown),
    i = "Read the file in its own encoding, e.g. `read.csv(file, fileEncoding = \"latin1\")`.",
    i = "Or convert the text: `iconv(x, \"latin1\", \"UTF-8\")`."
  )
}

# Column names of a matrix, or of each matrix in a named list.
matrix_columns <- function(x) {
  if (is_r_list(x)) {
    found <- lapply(x, matrix_columns)
    is_known <- has_unique_names(x) && all(vapply(found, is.character, NA))
    return(if (is_known) found)
  }
  names <- if (is.matrix(x)) colnames(x)
  if (length(names) && all(nzchar(names)) && !anyDuplicated(names)) names
}

# Select the columns of the training by their names, in their order, as from a data frame. Arrays
# without column names are used by position.
order_columns <- function(x, known, arg) {
  if (is_r_list(x)) {
    both <- if (is.list(known)) intersect(names(x), names(known))
    x[both] <- lapply(both, function(name) {
      order_columns(x[[name]], known[[name]], sprintf("%s$%s", arg, name))
    })
    return(x)
  }
  present <- matrix_columns(x)
  if (is.null(present) || !is.character(known)) {
    return(x)
  }
  absent <- setdiff(known, present)
  if (length(absent)) {
    problem <- "The matrix `%s` has no column \"%s\", a feature of the training."
    abort_input(
      sprintf(problem, arg, absent[[1L]]),
      i = sprintf("Its columns are %s.", list_names(present)),
      i = "If they are in the order of the training, remove their names: `unname(x)`."
    )
  }
  x[, known, drop = FALSE]
}

# Some rows of an array, or of each array in a list.
take_rows <- function(x, rows) {
  if (is.data.frame(x)) {
    return(x[rows, , drop = FALSE])
  }
  if (is.list(x)) {
    return(lapply(x, take_rows, rows))
  }
  if (length(dim(x)) < 2L) {
    return(x[rows])
  }
  others <- rep(list(quote(expr = )), length(dim(x)) - 1L)
  do.call(`[`, c(list(x, rows), others, drop = FALSE))
}

# TRUE for each row without a missing or infinite value, in an array or in all arrays of a list.
complete_rows <- function(x) {
  if (is.list(x)) {
    return(Reduce(`&`, lapply(x, complete_rows)))
  }
  lacks <- if (is.double(x)) !is.finite(x) else is.na(x)
  if (!any(lacks)) {
    return(rep(TRUE, count_rows(x)))
  }
  rowSums(array(lacks, c(count_rows(x), length(x) / count_rows(x)))) == 0L
}

check_array_type <- function(x, arg, label, text) {
  if (inherits(x, "integer64")) {
    problem <- sprintf("`%s` contains 64-bit integers (integer64).", arg)
    abort_input(problem, i = "Convert it with `as.integer()` or `as.numeric()`.")
  }
  if (is.character(x) && label) {
    problem <- sprintf("`%s` contains strings.", arg)
    abort_input(problem, i = "Make it a factor: `factor(y)`.")
  }
  if (text && is.character(x) && length(x) > count_rows(x)) {
    problem <- sprintf("`%s` has %d strings in a row.", arg, as.integer(length(x) / count_rows(x)))
    advice <- "Strings are one per row: pass a list of arrays, one for each input of the model."
    abort_input(problem, i = advice)
  }
  # is.numeric() is FALSE for factors, dates and times.
  fits <- is.numeric(x) || is.logical(x) || is.raw(x)
  fits <- fits || (text && is.character(x)) || (label && is.factor(x))
  check_fits(x, fits, if (label) "a numeric array or a factor" else "a numeric array", FALSE, arg)
}

check_no_missing <- function(x, arg) {
  if (anyNA(x)) {
    at <- which(is.na(x))[[1L]]
    where <- if (is.null(dim(x))) at else paste(arrayInd(at, dim(x)), collapse = ", ")
    problem <- sprintf("`%s` has missing values; the first is element [%s].", arg, where)
    abort_input(problem, i = "Remove these rows, or fill in the values.")
  }
}

# Python's lists and dicts are lists of R, too.
is_r_list <- function(x) is.list(x) && !is_python(x)

count_rows <- function(x) {
  if (is_python(x)) {
    # A Spark DataFrame has no length here.
    tryCatch(reticulate::py_len(x), error = function(error) NA_integer_)
  } else {
    NROW(x)
  }
}

as_numpy <- function(x, dtypes) {
  if (is_python(x)) {
    return(x)
  }
  numpy <- reticulate::import("numpy", convert = FALSE)
  dtype <- c(integer = "int32", raw = "uint8", dtypes)[typeof(x)]
  dtype <- if (is.na(dtype)) dtypes[["double"]] else unname(dtype)
  numpy$ascontiguousarray(as_plain_array(x), dtype = dtype)
}

as_feature_array <- function(x) as_numpy(x, c(character = "str", double = "float32"))

# Columns of barrier_apply() retain their type: doubles are not converted to float32.
as_column_array <- function(x) as_numpy(x, c(logical = "bool", double = "float64"))

as_label_array <- function(y) {
  if (is.factor(y)) {
    y <- as.integer(y) - 1L
  } else if (is.logical(y)) {
    storage.mode(y) <- "integer"
  }
  as_feature_array(y)
}

# A vector without dimensions becomes an array of one dimension: reticulate would convert a vector
# of length 1 to a scalar.
as_plain_array <- function(x) {
  size <- dim(x) %||% length(x)
  # reticulate converts raw vectors to bytes, regardless of their dimensions.
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
  # Not reticulate::dict(), which replaces a name by the variable of that name if there is one.
  if (is_r_list(x)) reticulate::r_to_py(lapply(x, as_array)) else as_array(x)
}
