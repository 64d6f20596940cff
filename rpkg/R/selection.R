# Columns chosen as with tidyselect: `label = Species`, `features = c(a, starts_with("x"))`, `-id`.
# Strings, and variables that hold them, name columns, too.

# The arguments of a call that may be bare names of columns, as quosures; NULL for those left out.
named_columns <- function(frame) {
  names <- c("label", "features", "weight")
  lapply(rlang::set_names(names), function(name) {
    is_left_out <- eval(call("missing", as.symbol(name)), frame)
    if (!is_left_out) eval(rlang::call2(rlang::enquo, as.symbol(name)), frame)
  })
}

# The strings that `label`, `features` and `weight` stand for; `given` are quosures by these names.
# `options` are data_options().
select_columns <- function(given, data, options) {
  columns <- known_columns(data)
  read <- function() columns %||% read_columns(data, options)
  label <- select_labels(given$label, columns, read)
  weight <- select_one(given$weight, columns, read, "weight")
  others <- c(
    if (is.list(label) || rlang::is_string(label)) unlist(label),
    if (rlang::is_string(weight)) weight
  )
  features <- select_features(given$features, columns, read, others)
  list(label = label, features = features, weight = weight)
}

# The columns of data that R knows, as a data frame or as names; NULL for those of files and arrays.
known_columns <- function(data) {
  if (inherits(data, "tbl_spark")) {
    colnames(data)
  } else if (is.data.frame(data)) {
    data
  } else if (is_python_frame(data)) {
    as.character(unlist(reticulate::py_to_r(reticulate::import_builtins()$list(data$columns))))
  } else if (is_r_list(data) && length(data) && is.data.frame(data[[1L]])) {
    data[[1L]]
  }
}

# Names of the columns of files, which Python reads.
read_columns <- function(data, options) {
  if (!is_paths(data)) {
    return(NULL)
  }
  spec <- options$tfrecord_spec
  path <- check_data_path(data, "data")
  as.character(unlist(call_bridge("list_columns", path, spec)))
}

# One column, or, for a model of several outputs, a named list of one for each.
select_labels <- function(quo, columns, read) {
  select <- function(part, name) select_one(part, columns, read, name)
  select_parts(quo, "label", select) %||% select(quo, "label")
}

# Selection of each part of `list(a = x, b = y)`; NULL for any other expression.
select_parts <- function(quo, arg, select) {
  if (!rlang::is_quosure(quo) || !rlang::quo_is_call(quo, "list")) {
    return(NULL)
  }
  parts <- rlang::call_args(quo)
  env <- rlang::quo_get_env(quo)
  names <- sprintf("%s$%s", arg, rlang::names2(parts))
  Map(function(part, name) select(rlang::as_quosure(part, env), name), parts, names)
}

select_one <- function(quo, columns, read, arg) {
  plain <- evaluate_strings(quo, column_names(columns))
  if (plain$found) {
    return(plain$value)
  }
  found <- select_by_tidyselect(quo, read(), arg)
  if (length(found) != 1L) {
    count <- if (length(found)) sprintf("%d: %s", length(found), list_names(found)) else "none"
    problem <- "`%s = %s` must select one column, not %s."
    abort_input(sprintf(problem, arg, rlang::as_label(quo), count))
  }
  found
}

# `others`, the label and the weight, are not among the features unless the selection names them.
select_features <- function(quo, columns, read, others, arg = "features") {
  parts <- select_parts(quo, arg, function(part, name) {
    select_features(part, columns, read, others, name)
  })
  if (!is.null(parts)) {
    return(parts)
  }
  plain <- evaluate_strings(quo, column_names(columns))
  if (plain$found) {
    return(plain$value)
  }
  names <- read()
  found <- select_by_tidyselect(quo, names, arg)
  if (!length(found)) {
    problem <- sprintf("`%s = %s` selects no column of `data`.", arg, rlang::as_label(quo))
    abort_input(problem, i = sprintf("Its columns are %s.", list_names(column_names(names))))
  }
  setdiff(found, setdiff(others, all.vars(rlang::quo_get_expr(quo))))
}

column_names <- function(columns) if (is.data.frame(columns)) names(columns) else columns

# Columns that are named without the data: strings, expressions whose values are strings, and one
# bare name.
evaluate_strings <- function(quo, known) {
  if (!rlang::is_quosure(quo)) {
    return(list(found = TRUE, value = quo))
  }
  expr <- rlang::quo_get_expr(quo)
  selects <- intersect(all.names(expr), selection_helpers)
  if (length(selects) || any(all.vars(expr) %in% known)) {
    is_column <- is.symbol(expr) && !length(selects)
    return(list(found = is_column, value = if (is_column) as.character(expr)))
  }
  value <- tryCatch(rlang::eval_tidy(quo), error = function(error) quo)
  is_plain <- is.null(value) || is.character(value) || (is_r_list(value))
  if (is.symbol(expr) && !is_plain) {
    return(list(found = TRUE, value = as.character(expr)))
  }
  is_plain <- is_plain || (is.numeric(value) && is.null(known)) || !is.language(expr)
  list(found = is_plain && !rlang::is_quosure(value), value = value)
}

selection_helpers <- c(
  c("starts_with", "ends_with", "contains", "matches", "num_range", "everything", "last_col"),
  c("one_of", "all_of", "any_of", "where")
)

select_by_tidyselect <- function(quo, columns, arg) {
  if (is.null(columns)) {
    text <- "`%s = %s` selects columns, but the column names of `data` are not known."
    problem <- sprintf(text, arg, rlang::as_label(quo))
    abort_input(problem, i = "If `data` has columns, name them as strings.")
  }
  names <- column_names(columns)
  data <- if (is.data.frame(columns)) columns else rlang::set_names(as.list(names), names)
  tests <- is.data.frame(columns)
  selected <- or_abort(
    tidyselect::eval_select(quo, data, allow_rename = FALSE, allow_predicates = tests),
    sprintf("`%s = %s` does not select columns of `data`.", arg, rlang::as_label(quo)),
    i = sprintf("Its columns are %s.", list_names(names))
  )
  names[selected]
}
