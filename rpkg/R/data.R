# `data` and `validation_data` in three steps: check them (without Python), convert them, and pass
# them on. Between the steps they are a list of `kind`, `features` and the values.

check_data <- function(data, columns, route, allow_null = FALSE, arg = caller_arg(data)) {
  if (is.null(data) && allow_null) {
    return(NULL)
  }
  check_no_database(data, arg)
  if (!is.null(columns$preparation)) {
    check_can_prepare(columns$preparation, data, arg)
  }
  if (is_python(data)) {
    column_source("python", data, columns)
  } else if (inherits(data, "tbl_spark")) {
    check_table(data, columns, route, arg)
  } else if (is.data.frame(data)) {
    check_frame(data, columns, arg)
  } else if (is.list(data) || is.array(data)) {
    check_arrays_of_data(data, columns, arg)
  } else if (is.function(data)) {
    check_worker_function(data, arg)
    list(kind = "function", value = data)
  } else if (is_paths(data)) {
    column_source("path", check_data_path(data, arg), columns)
  } else {
    abort_data(data, allow_null, arg)
  }
}

# A table of dbplyr, of which tables of sparklyr are a kind.
check_no_database <- function(data, arg, predicts = FALSE) {
  is_table <- inherits(data, "tbl_lazy") && !inherits(data, "tbl_spark")
  if (is_table || inherits(data, "DBIConnection")) {
    what <- if (is_table) "table in" else "connection to"
    fetching <- if (is_table) "dplyr::collect()" else "DBI::dbReadTable()"
    abort_input(
      sprintf("`%s` is a %s a database, whose rows are not in this session.", arg, what),
      i = sprintf("Fetch them with `%s`.", fetching),
      i = if (predicts) "Or predict in the database, with `augment_sql(table, fit)`."
    )
  }
}

check_arrays_of_data <- function(data, columns, arg) {
  parts <- split_data(data, arg)
  at <- attr(parts, "at")
  # A column that was chosen as `data["y"]`.
  is_column <- vapply(parts, function(part) is.data.frame(part) && length(part) == 1L, NA)
  for (part in setdiff(names(parts)[is_column], "x")) {
    parts[[part]] <- parts[[part]][[1L]]
  }
  is_frame <- is.data.frame(parts$x)
  if (is_frame) {
    check_frame_names(parts$x, at[["x"]])
    features <- columns$features %||% names(parts$x)
    check_columns(unlist(features), names(parts$x), at[["x"]], "one of the `features`")
    coded <- encode_features(parts$x, features, columns, at[["x"]])
  } else {
    x <- order_columns(parts$x, columns$feature_names, at[["x"]])
    features <- matrix_columns(x)
    coded <- list(x = x, features = features, feature_names = features)
  }
  parts["x"] <- coded["x"]
  for (part in names(parts)) {
    check_arrays(parts[[part]], at[[part]], label = part == "y", text = part == "x")
  }
  check_same_rows(parts, at)
  c(
    list(kind = "arrays", y = as_label(parts$y), sample_weight = parts$sample_weight),
    coded,
    list(arguments_used = if (is_frame) c("categories", "encode"))
  )
}

# `data` as a list of x, and y and sample_weight if passed. The attribute `at` names each in errors.
split_data <- function(data, arg) {
  parts <- c("x", "y", "sample_weight")
  if (is.array(data) || (has_unique_names(data) && !any(names(data) %in% parts))) {
    return(structure(list(x = data), at = c(x = arg)))
  }
  expected <- parts[seq_along(data)]
  if (length(data) < 1L || length(data) > 3L) {
    abort_data(data, FALSE, arg)
  }
  if (is.null(names(data))) {
    at <- sprintf("%s[[%d]]", arg, seq_along(data))
    names(data) <- expected
  } else if (setequal(names(data), expected)) {
    data <- data[expected]
    at <- paste0(arg, "$", expected)
  } else {
    abort_data(data, FALSE, arg)
  }
  structure(data, at = rlang::set_names(at, expected))
}

# One array, or a list of them for a model of several inputs or outputs.
check_arrays <- function(x, arg, label = FALSE, text = FALSE, may_be_empty = FALSE) {
  if (!is_r_list(x)) {
    return(check_array(x, arg, label, text, may_be_empty))
  }
  if (length(x) == 0L) {
    abort_input(sprintf("`%s` is an empty list.", arg), i = "Give at least one array.")
  }
  for (i in seq_along(x)) {
    check_array(x[[i]], sprintf("%s[[%d]]", arg, i), label, text, may_be_empty)
  }
}

check_same_rows <- function(parts, at) {
  rows <- unlist(lapply(names(parts), function(part) count_all_rows(parts[[part]], at[[part]])))
  rows <- rows[!is.na(rows)]
  if (length(unique(rows)) > 1L) {
    more <- if (length(rows) > 5L) sprintf("and so on: %d arrays in all", length(rows))
    counts <- c(utils::head(sprintf("`%s` has %d", names(rows), rows), 5L), more)
    numbers <- Filter(function(part) is_list_of_values(parts[[part]]), names(parts))
    abort_input(
      "The arrays must have the same number of rows.",
      x = sprintf("%s.", toString(counts)),
      i = "The first dimension of each array counts the rows.",
      i = if (length(numbers) > 0L) {
        sprintf("`%1$s` is a list of single values: pass `unlist(%1$s)`.", at[[numbers[[1L]]]])
      }
    )
  }
}

is_list_of_values <- function(x) {
  identical(class(x), "list") && is.null(names(x)) && length(x) > 1L && all(lengths(x) == 1L)
}

count_all_rows <- function(x, arg) {
  if (!is_r_list(x)) {
    return(rlang::set_names(count_rows(x), arg))
  }
  rlang::set_names(vapply(x, count_rows, 1L), sprintf("%s[[%d]]", arg, seq_along(x)))
}

check_table <- function(data, columns, route, arg) {
  check_has_spark(route, arg)
  present <- with_named_fields(colnames(data), columns[c("label", "features", "weight")])
  columns$features <- check_named_columns(columns, present, arg)
  column_source("table", data, columns)
}

check_has_spark <- function(route, arg) {
  if (!has_spark(route)) {
    problem <- sprintf("`%s` is a Spark table, but `sc` is %s.", arg, place_without_spark(route))
    advice <- "Pass the table's Spark connection as `sc`, or use `dplyr::collect()` on the table."
    abort_input(problem, i = advice)
  }
}

# Data from which Python reads columns by their names.
column_source <- function(kind, value, columns) {
  levels <- label_values(columns)
  list(
    kind = kind,
    value = value,
    features = columns$features,
    weight = columns$weight,
    levels = if (!is.null(levels)) as.character(levels)
  )
}

is_paths <- function(data) {
  is.character(data) && is.null(dim(data)) && length(data) && all(nzchar(data))
}

# The columns of files are read on this machine, too, so a local path must exist here. One path is a
# string for Python, several are a list.
check_data_path <- function(path, arg) {
  absolute <- vapply(path, absolute_path, "", USE.NAMES = FALSE)
  is_here <- grepl("^(file://|/)", absolute)
  local <- sub("^file://", "", absolute)
  is_there <- file.exists(local) | lengths(lapply(local, Sys.glob)) > 0L
  absent <- path[is_here & !is_there]
  if (length(absent)) {
    problem <- sprintf("There is no file or folder at the path `%s`: %s.", arg, absent[[1L]])
    abort_input(problem, i = "Pass the path or URI of Parquet or TFRecord files.")
  }
  if (length(absolute) == 1L) absolute else as.list(absolute)
}

# Workers have another working directory, and Python does not expand `~`.
absolute_path <- function(path) {
  if (grepl("^[A-Za-z][A-Za-z0-9+.-]+://", path)) {
    return(path)
  }
  path <- path.expand(path)
  if (startsWith(path, "/")) path else file.path(getwd(), path)
}

abort_data <- function(data, allow_null, arg) {
  abort_input(
    sprintf("`%s` is %s, which is not a set of rows.", arg, describe(data)),
    i = paste0("It can be", if (allow_null) " `NULL` or", ":"),
    "*" = "`list(x, y)` or `list(x, y, sample_weight)` with R or Python arrays;",
    "*" = "an array, or a named list of the model's inputs, if there are no labels;",
    "*" = "a data frame with the column that `label` names;",
    "*" = "a sparklyr table, or a PySpark or pandas DataFrame;",
    "*" = "the paths or URIs of Parquet or TFRecord files;",
    "*" = "a function of the worker's context that returns a tf.data.Dataset of batches."
  )
}

# Recode a factor label by the levels of the training, regardless of the order of its own levels.
match_levels <- function(data, trained, arg = "data") {
  if (reads_numbers_as_levels(data$y, trained)) {
    data$y <- factor(data$y)
  }
  given <- levels(data$y)
  if (is.null(given) || identical(given, trained)) {
    return(data)
  }
  used <- given[tabulate(data$y, length(given)) > 0L]
  unknown <- setdiff(used, trained)
  if (length(unknown)) {
    known <- if (is.null(trained)) "not a factor" else list_names(trained)
    problem <- "The label of `%s` has the value \"%s\", which the training did not have."
    abort_input(
      sprintf(problem, arg, unknown[[1L]]),
      x = sprintf("`%s`: %s.", arg, list_names(given)),
      x = sprintf("The training: %s.", known),
      i = "Leave these rows out, or make a factor with the levels of the training."
    )
  }
  data$y <- factor(as.character(data$y), levels = trained, ordered = is.ordered(data$y))
  data
}

# What predictions take from the label, or from that of each of several outputs.
describe_labels <- function(y) {
  describe_one <- function(y) {
    list(levels = levels(y), ordered = is.ordered(y), columns = matrix_columns(y))
  }
  if (!is_python(y)) lapply(if (is.list(y)) y else list(y), describe_one)
}

# TRUE if the label is numeric and the training had a factor of numbers: they are its levels.
reads_numbers_as_levels <- function(y, levels) {
  is_plain <- is.numeric(y) && !is.factor(y) && is.null(dim(y))
  numbers <- suppressWarnings(as.numeric(levels))
  is_plain && length(levels) > 0L && !anyNA(numbers)
}

# TRUE and FALSE become classes, like the levels of a factor.
as_label <- function(y) if (is.logical(y) && is.null(dim(y))) factor(y, c(FALSE, TRUE)) else y

# Levels with the codes 0, 1, 2, ... of the label, if they are known without Python.
label_levels <- function(data) levels(data$y) %||% data$levels

# Check that the model's loss treats the codes of the label as classes, not as numbers.
check_label_levels <- function(model, y) {
  known <- levels(y)
  if (is.null(known)) {
    return(invisible())
  }
  tryCatch(
    call_bridge("check_levels", model, as.list(known)),
    tfdist_error_input = function(error) {
      unused <- setdiff(known, as.character(y))
      if (!length(unused)) {
        rlang::cnd_signal(error)
      }
      abort_input(
        conditionMessage(error),
        i = sprintf("`droplevels()` drops levels without rows: %s.", list_names(unused))
      )
    }
  )
}

inform_levels <- function(levels) {
  if (is.null(levels)) {
    return(invisible())
  }
  codes <- sprintf("%s = %d", levels, seq_along(levels) - 1L)
  codes <- if (length(codes) > 10L) c(codes[1:8], "...", codes[[length(codes)]]) else codes
  text <- sprintf("The levels of the label become codes: %s.", toString(codes))
  rlang::inform(text, class = "tfdist_message_levels")
}

# Call `code` with checked data in Python's form. A temporary view exists until `code` returns.
with_python_data <- function(data, session, code, arg = "data") {
  if (is.null(data)) {
    return(code(NULL))
  }
  switch(
    data$kind,
    python = ,
    path = code(data$value),
    "function" = code(as_r_function(data$value, NULL, identity, arg = arg)),
    arrays = code(as_python_arrays(data)),
    columns = code(as_input(data$value, as_column_array)),
    table = with_spark_frame(data$value, session, code)
  )
}

as_python_arrays <- function(data) {
  reticulate::tuple(
    as_input(data$x, as_feature_array),
    if (!is.null(data$y)) as_input(data$y, as_label_array),
    if (!is.null(data$sample_weight)) as_input(data$sample_weight, as_feature_array)
  )
}
