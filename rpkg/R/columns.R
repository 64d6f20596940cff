# Columns of data frames, tables and files to use, with their options: ColumnSpec in Python.

column_spec <- function(label, features, weight, options) {
  options <- options %||% data_options()
  list(
    label = check_label(label),
    features = check_features(features),
    weight = check_string(weight, allow_null = TRUE),
    tensors = options$tensors,
    categories = null_if_empty(lapply(options$categories, as_comparable_values)),
    encode = unlist(options$encode),
    tfrecord_spec = options$tfrecord_spec,
    options = options
  )
}

# One label is a string, those of several outputs are a named list of strings.
check_label <- function(x, arg = caller_arg(x)) {
  if (!is.list(x)) {
    return(check_string(x, allow_null = TRUE, arg = arg))
  }
  expected <- "the name of a column, or a named list of them such as `list(left = \"a\")`"
  check_named_parts(x, check_string, expected, arg)
}

# One input is a vector of columns, several are a named list of such vectors.
check_features <- function(x, arg = caller_arg(x)) {
  if (!is.list(x)) {
    return(invisible(unname(check_strings(x, allow_null = TRUE, arg = arg))))
  }
  expected <- "names of columns, or a named list of them such as `list(left = c(\"a\", \"b\"))`"
  check_named_parts(x, check_strings, expected, arg)
}

check_named_parts <- function(x, check, expected, arg) {
  fits <- has_unique_names(x) && !any(grepl("/", names(x), fixed = TRUE))
  check_fits(x, fits, expected, TRUE, arg)
  for (name in names(x)) {
    check(x[[name]], arg = sprintf("%s$%s", arg, name))
  }
  invisible(lapply(x, unname))
}

# The values of the label that `categories` lists.
label_values <- function(columns) {
  if (rlang::is_string(columns$label)) columns$categories[[columns$label]]
}

# Every column that the arguments name must exist.
check_named_columns <- function(columns, present, arg) {
  check_columns(unlist(columns$label), present, arg, "the `label`")
  check_columns(columns$weight, present, arg, "the `weight`")
  check_columns(unlist(columns$features), present, arg, "one of the `features`")
  for (option in c("tensors", "categories", "encode")) {
    check_columns(names(columns[[option]]), present, arg, sprintf("named in `%s`", option))
  }
  features <- columns$features %||% setdiff(present, c(unlist(columns$label), columns$weight))
  check_feature_names(unlist(features), columns, arg)
  features
}

# The columns of a Spark table, and fields of structs that are named: "s.a". Python checks these.
with_named_fields <- function(present, named) {
  named <- as.character(unlist(named))
  is_field <- grepl(".", named, fixed = TRUE) & sub("[.].*", "", named) %in% present
  union(present, named[is_field])
}

check_feature_names <- function(features, columns, arg) {
  if (length(features) == 0L) {
    problem <- "`%s` has no column other than the label %s."
    problem <- sprintf(problem, arg, list_names(unlist(columns$label)))
    abort_input(problem, i = "Add at least one feature column.")
  }
  for (part in c("label", "weight")) {
    both <- intersect(unlist(columns[[part]]), features)
    if (length(both)) {
      problem <- sprintf("`features` contains \"%s\", which is the %s.", both[[1L]], part)
      advice <- sprintf("Leave it out of `features`, or name another column as `%s`.", part)
      abort_input(problem, i = advice)
    }
  }
}

# Reject arguments about columns if the data have none. Data frames list those that they used.
check_has_columns <- function(columns, data, validation = NULL) {
  if (has_named_columns(data) || has_named_columns(validation)) {
    return(invisible())
  }
  arguments <- c("weight", "tensors", "categories", "encode", "tfrecord_spec")
  given <- arguments[lengths(columns[arguments]) > 0L]
  unused <- setdiff(given, c(data$arguments_used, validation$arguments_used))
  if (length(unused)) {
    problem <- "`%s` describes columns, but `data` has no columns to which it applies."
    advice <- "`weight`, `categories` and `encode` also with data frames."
    advice <- paste("It works with tables and files;", advice)
    abort_input(sprintf(problem, unused[[1L]]), i = advice)
  }
}

# TRUE if Python reads the rows by the names of columns.
has_named_columns <- function(data) {
  isTRUE(data$kind %in% c("table", "path")) || is_python_frame(data$value)
}

# The arguments about columns for Python: only the label and options if it receives arrays.
as_python_columns <- function(columns, data, validation) {
  options <- columns$options
  if (!has_named_columns(data) && !has_named_columns(validation)) {
    options[c("tensors", "categories", "encode", "tfrecord_spec")] <- list(NULL)
    return(list(label = columns$label, data_options = as_python_options(options)))
  }
  options["categories"] <- list(columns$categories)
  # Python does not encode text that is an input by itself.
  is_text <- vapply(as.list(columns$encode), identical, NA, "text")
  options["encode"] <- list(null_if_empty(columns$encode[!is_text]))
  options["tensors"] <- list(columns$tensors)
  list(
    label = columns$label,
    features = null_if_empty(as_python_features(columns$features)),
    weight = columns$weight,
    data_options = as_python_options(options)
  )
}

as_python_features <- function(features) {
  if (is.list(features)) lapply(features, as.list) else as.list(features)
}

# If the levels of a label are known, text in tables and files must get their codes. Numbers there
# are codes already.
add_label_levels <- function(columns, data, rows) {
  has_values <- !is.null(label_values(columns))
  if (is.null(columns$levels) || has_values || is.null(data)) {
    return(columns)
  }
  if (data$kind == "path" || has_text_column(rows, columns$label)) {
    columns$categories[[columns$label]] <- columns$levels
  }
  columns
}

# TRUE if the column of a PySpark DataFrame is text. No other data have typed columns.
has_text_column <- function(rows, name) {
  if (!is_spark_frame(rows)) {
    return(FALSE)
  }
  types <- do.call(rbind, lapply(rows$dtypes, unlist))
  any(types[, 1L] == name & grepl("^(string|varchar|char)", types[, 2L]))
}

is_spark_frame <- function(x) any(grepl("^pyspark\\..*DataFrame$", class(x)))

# A DataFrame of PySpark or pandas.
is_python_frame <- function(x) any(grepl("^(pyspark|pandas)\\..*DataFrame$", class(x)))
