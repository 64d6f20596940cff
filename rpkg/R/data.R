# `data` and `validation_data` in three steps: look at them (no Python yet), convert them, and hand
# them over. Between the steps they are a list of `kind`, `features`, `levels` and the values.

check_data <- function(
  data,
  label,
  features,
  route,
  allow_null = FALSE,
  arg = caller_arg(data),
  call = caller_env()
) {
  if (is.null(data) && allow_null) {
    return(NULL)
  }
  if (is_python(data)) {
    list(kind = "python", value = data, features = features %||% python_features(data, label))
  } else if (inherits(data, "tbl_spark")) {
    check_table(data, label, features, route, arg, call)
  } else if (is.data.frame(data)) {
    features <- check_frame(data, label, features, arg, call)
    x <- frame_matrix(data, features)
    list(kind = "arrays", x = x, y = data[[label]], features = features)
  } else if (is.list(data)) {
    check_arrays_of_data(data, features, arg, call)
  } else {
    abort_data(data, allow_null, arg, call)
  }
}

# A PySpark DataFrame says its columns; Python checks them.
python_features <- function(data, label) {
  if (any(grepl("^pyspark\\..*DataFrame$", class(data)))) {
    setdiff(unlist(data$columns), label)
  }
}

check_arrays_of_data <- function(data, features, arg, call) {
  parts <- data_parts(data, arg, call)
  at <- attr(parts, "at")
  if (is.data.frame(parts$x)) {
    features <- features %||% names(parts$x)
    check_columns(features, names(parts$x), at[["x"]], "one of the `features`", call)
    check_frame_features(parts$x, features, at[["x"]], call)
    parts$x <- frame_matrix(parts$x, features)
  } else {
    features <- NULL
  }
  for (part in names(parts)) {
    check_arrays(parts[[part]], at[[part]], call, label = part == "y")
  }
  check_same_rows(parts, at, call)
  list(
    kind = "arrays",
    x = parts$x,
    y = parts$y,
    sample_weight = parts$sample_weight,
    features = features
  )
}

# `data` as a list with the names x, y and perhaps sample_weight, and how the user calls each.
data_parts <- function(data, arg, call) {
  expected <- c("x", "y", "sample_weight")[seq_along(data)]
  if (length(data) < 2L || length(data) > 3L) {
    abort_data(data, FALSE, arg, call)
  }
  if (is.null(names(data))) {
    at <- sprintf("%s[[%d]]", arg, seq_along(data))
    names(data) <- expected
  } else if (setequal(names(data), expected)) {
    data <- data[expected]
    at <- paste0(arg, "$", expected)
  } else {
    abort_data(data, FALSE, arg, call)
  }
  structure(data, at = rlang::set_names(at, expected))
}

# One array, or a list of them for a model of several inputs or outputs.
check_arrays <- function(x, arg, call, label = FALSE) {
  if (!is.list(x) || is_python(x)) {
    return(check_array(x, arg, call, label))
  }
  if (length(x) == 0L) {
    abort_input(sprintf("`%s` is an empty list.", arg), call = call)
  }
  for (i in seq_along(x)) {
    check_array(x[[i]], sprintf("%s[[%d]]", arg, i), call, label)
  }
}

check_same_rows <- function(parts, at, call) {
  rows <- unlist(lapply(names(parts), function(part) all_row_counts(parts[[part]], at[[part]])))
  rows <- rows[!is.na(rows)]
  if (length(unique(rows)) > 1L) {
    counts <- sprintf("`%s` has %d", names(rows), rows)
    abort_input(
      sprintf("The arrays must have the same number of rows: %s.", toString(counts)),
      call = call
    )
  }
}

all_row_counts <- function(x, arg) {
  if (!is.list(x) || is_python(x)) {
    return(rlang::set_names(row_count(x), arg))
  }
  rlang::set_names(vapply(x, row_count, 1L), sprintf("%s[[%d]]", arg, seq_along(x)))
}

check_table <- function(data, label, features, route, arg, call) {
  if (route$kind == "local") {
    abort_input(
      c(
        sprintf("`%s` is a Spark table, and `sc` is this machine without Spark.", arg),
        i = "Give the Spark connection of the table as `sc`, or `dplyr::collect()` the table."
      ),
      call = call
    )
  }
  check_columns(label, colnames(data), arg, "the `label`", call)
  if (!is.null(features)) {
    check_columns(features, colnames(data), arg, "one of the `features`", call)
  }
  features <- features %||% setdiff(colnames(data), label)
  check_feature_names(features, label, arg, call)
  list(kind = "table", value = data, features = features)
}

abort_data <- function(data, allow_null, arg, call) {
  abort_input(
    c(
      sprintf("`%s` is %s, which holds no rows with labels.", arg, describe(data)),
      i = paste0("It can be", if (allow_null) " `NULL` or", ":"),
      "*" = "`list(x, y)` or `list(x, y, sample_weight)` with arrays of R or Python;",
      "*" = "a data frame with a column for `label`;",
      "*" = "a table of sparklyr, or a PySpark DataFrame."
    ),
    call = call
  )
}

# Labels that are factors: validation must use the codes of training.
check_levels <- function(training, validation, call = caller_env()) {
  given <- levels(training$y)
  if (is.factor(validation$y) && !identical(levels(validation$y), given)) {
    abort_input(
      c(
        "The labels of `data` and `validation_data` must be factors of the same levels.",
        x = sprintf("`data`: %s.", list_levels(given)),
        x = sprintf("`validation_data`: %s.", list_levels(levels(validation$y))),
        i = "Use `factor(y, levels = levels(training_y))`."
      ),
      call = call
    )
  }
  given
}

list_levels <- function(levels) if (is.null(levels)) "no factor" else list_names(levels)

tell_levels <- function(levels) {
  if (is.null(levels)) {
    return(invisible())
  }
  codes <- sprintf("%s = %d", levels, seq_along(levels) - 1L)
  if (length(codes) > 10L) {
    codes <- c(codes[1:8], "...", codes[[length(codes)]])
  }
  rlang::inform(
    sprintf("The levels of the label become codes: %s.", toString(codes)),
    class = "tfdist_message_levels"
  )
}

# Calls `code` with the Python form of checked data. A temporary view lives as long as the call.
with_python_data <- function(data, session, code) {
  if (is.null(data)) {
    return(code(NULL))
  }
  switch(
    data$kind,
    python = code(data$value),
    arrays = code(as_python_arrays(data)),
    table = with_spark_frame(data$value, session, code)
  )
}

as_python_arrays <- function(data) {
  arrays <- list(as_input(data$x, as_feature_array), as_input(data$y, as_label_array))
  if (!is.null(data$sample_weight)) {
    arrays <- c(arrays, list(as_input(data$sample_weight, as_feature_array)))
  }
  do.call(reticulate::tuple, arrays)
}
