# Which columns of data frames, tables and files are used, and as what: the arguments of
# barrier_train() that stand beside `data`, checked and kept together.

new_choice <- function(
  label,
  features,
  weight,
  tensors,
  categories,
  tfrecord_spec,
  repartition,
  call = caller_env()
) {
  list(
    label = check_string(label, call = call),
    features = check_features(features, call = call),
    weight = check_string(weight, allow_null = TRUE, call = call),
    tensors = check_tensors(tensors, call = call),
    categories = check_categories(categories, call = call),
    tfrecord_spec = check_spec(tfrecord_spec, call = call),
    repartition = check_flag(repartition, call = call)
  )
}

# One input is a vector of columns, several are a named list of such vectors.
check_features <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x)) {
    return(invisible(NULL))
  }
  if (!is.list(x)) {
    return(invisible(unname(check_strings(x, allow_null = TRUE, arg = arg, call = call))))
  }
  if (!is_named_once(x) || any(grepl("/", names(x), fixed = TRUE))) {
    expected <- "names of columns, or a named list of them such as `list(left = c(\"a\", \"b\"))`"
    abort_expected(x, expected, TRUE, arg, call)
  }
  for (name in names(x)) {
    check_strings(x[[name]], arg = sprintf("%s$%s", arg, name), call = call)
  }
  invisible(lapply(x, unname))
}

numpy_types <- c(
  c("bool", "int8", "int16", "int32", "int64"),
  c("uint8", "uint16", "uint32", "uint64"),
  c("float16", "float32", "float64")
)

check_tensors <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x)) {
    return(invisible(NULL))
  }
  if (!is.list(x) || !is_named_once(x)) {
    expected <- "a named list such as `list(image = list(\"uint8\", c(28, 28)))`"
    abort_expected(x, expected, TRUE, arg, call)
  }
  for (name in names(x)) {
    check_promise(x[[name]], sprintf("%s$%s", arg, name), call)
  }
  invisible(x)
}

check_promise <- function(x, arg, call) {
  if (!is.list(x) || length(x) != 2L) {
    expected <- "a list of type and shape such as `list(\"uint8\", c(28, 28))`"
    abort_expected(x, expected, FALSE, arg, call)
  }
  check_choice(x[[1L]], numpy_types, arg = sprintf("%s[[1]]", arg), call = call)
  shape <- x[[2L]]
  is_sizes <- length(shape) == 0L || (rlang::is_integerish(shape, finite = TRUE) && all(shape > 0))
  # NA: rows of any length.
  if (!is_sizes && !(length(shape) == 1L && is.na(shape))) {
    expected <- "whole numbers of at least 1, or `NA` for rows of any length"
    abort_expected(shape, expected, FALSE, sprintf("%s[[2]]", arg), call)
  }
}

check_categories <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x)) {
    return(invisible(NULL))
  }
  if (!is.list(x) || !is_named_once(x)) {
    expected <- "a named list such as `list(color = c(\"blue\", \"red\"))`"
    abort_expected(x, expected, TRUE, arg, call)
  }
  for (name in names(x)) {
    values <- x[[name]]
    if (!is.atomic(values) || length(values) == 0L || anyNA(values) || anyDuplicated(values)) {
      expected <- "a vector of different values, at least one and none missing"
      abort_expected(values, expected, FALSE, sprintf("%s$%s", arg, name), call)
    }
  }
  invisible(lapply(x, plain_values))
}

# Values as Python compares them with those of a column: 3 is no 3.0 there.
plain_values <- function(values) {
  if (is.factor(values)) {
    as.character(values)
  } else if (is.double(values) && rlang::is_integerish(values)) {
    as.integer(values)
  } else {
    as.vector(values)
  }
}

check_spec <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x)) {
    return(invisible(NULL))
  }
  is_type <- "^(int64|float32|bytes|string)(\\[\\])?$"
  if (!is.character(x) || !is_named_once(x) || !all(grepl(is_type, x))) {
    expected <- paste(
      "a named vector of \"int64\", \"float32\", \"bytes\" or \"string\", with \"[]\" behind it",
      "for lists"
    )
    abort_expected(x, expected, TRUE, arg, call)
  }
  invisible(x)
}

is_named_once <- function(x) {
  length(x) > 0L && rlang::is_named(x) && !anyDuplicated(names(x))
}

# Every column that the arguments name must be there.
check_chosen_columns <- function(choice, columns, arg, call) {
  check_columns(choice$label, columns, arg, "the `label`", call)
  check_columns(choice$weight, columns, arg, "the `weight`", call)
  check_columns(unlist(choice$features), columns, arg, "one of the `features`", call)
  check_columns(names(choice$tensors), columns, arg, "named in `tensors`", call)
  check_columns(names(choice$categories), columns, arg, "named in `categories`", call)
  features <- choice$features %||% setdiff(columns, c(choice$label, choice$weight))
  check_feature_names(unlist(features), choice, arg, call)
  features
}

check_feature_names <- function(features, choice, arg, call) {
  if (length(features) == 0L) {
    abort_input(
      sprintf("`%s` has no column other than the label \"%s\".", arg, choice$label),
      call = call
    )
  }
  for (part in c("label", "weight")) {
    if (any(choice[[part]] %in% features)) {
      abort_input(
        sprintf("`features` contains \"%s\", which is the %s.", choice[[part]], part),
        call = call
      )
    }
  }
}

# Refuses what is said of columns where there are none. Data know which of it they have used.
check_columns_there <- function(choice, data, validation = NULL, call = caller_env()) {
  if (has_named_columns(data) || has_named_columns(validation)) {
    return(invisible())
  }
  about <- c("weight", "tensors", "categories", "tfrecord_spec")
  given <- about[lengths(choice[about]) > 0L]
  unused <- setdiff(given, c(data$columns_used, validation$columns_used))
  if (length(unused)) {
    abort_input(
      c(
        sprintf("`%s` is about columns that Python reads, and `data` has none.", unused[[1L]]),
        i = "It is for tables and files; `weight` and `categories` are for data frames, too."
      ),
      call = call
    )
  }
}

# Whether Python reads the rows by the names of columns.
has_named_columns <- function(data) {
  isTRUE(data$kind %in% c("table", "path")) || is_spark_frame(data$value)
}

# What Python is told of columns: nothing where it is handed arrays alone.
sent_choice <- function(choice, data, validation = NULL) {
  if (!has_named_columns(data) && !has_named_columns(validation)) {
    return(list(label = choice$label))
  }
  python_choice(choice)
}

# The arguments as Python takes them.
python_choice <- function(choice) {
  features <- choice$features
  list(
    label = choice$label,
    features = if (is.list(features)) lapply(features, as.list) else as.list(features),
    weight = choice$weight,
    tensors = lapply(choice$tensors, python_promise),
    categories = lapply(choice$categories, as.list),
    tfrecord_spec = as.list(choice$tfrecord_spec),
    repartition = choice$repartition
  )
}

python_promise <- function(promise) {
  sizes <- lapply(promise[[2L]], function(size) if (!is.na(size)) as.integer(size))
  list(promise[[1L]], sizes)
}

# Where levels of a label are known, text in tables and files must get their codes. Numbers there
# are codes already.
with_label_levels <- function(choice, levels, data, rows) {
  is_named <- !is.null(choice$categories[[choice$label]])
  if (is.null(levels) || is_named || is.null(data)) {
    return(choice)
  }
  if (data$kind == "path" || has_text_column(rows, choice$label)) {
    choice$categories[[choice$label]] <- levels
  }
  choice
}

# Of a PySpark DataFrame; all else has no columns with types.
has_text_column <- function(rows, name) {
  if (!is_spark_frame(rows)) {
    return(FALSE)
  }
  types <- do.call(rbind, lapply(rows$dtypes, unlist))
  any(types[, 1L] == name & grepl("^(string|varchar|char)", types[, 2L]))
}

is_spark_frame <- function(x) any(grepl("^pyspark\\..*DataFrame$", class(x)))
