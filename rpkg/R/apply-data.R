# The argument `data` of barrier_apply(): named columns whose rows the function iterates over.

check_apply_data <- function(data, route, arg = caller_arg(data), call = caller_env()) {
  if (is.null(data)) {
    return(NULL)
  }
  if (is_python(data)) {
    return(list(kind = "python", value = data))
  }
  if (inherits(data, "tbl_spark")) {
    check_has_spark(route, arg, call)
    return(list(kind = "table", value = data))
  }
  if (!is.list(data)) {
    abort_apply_data(data, arg, call)
  }
  if (length(data) == 0L || !rlang::is_named(data) || anyDuplicated(names(data))) {
    abort_input(
      sprintf("`%s` must have columns with unique names.", arg),
      i = "Write `list(image = x, label = y)`, or pass a data frame.",
      call = call
    )
  }
  at <- rlang::set_names(paste0(arg, "$", names(data)), names(data))
  for (name in names(data)) {
    check_array(data[[name]], at[[name]], call)
  }
  check_same_rows(data, at, call)
  list(kind = "columns", value = as.list(data))
}

abort_apply_data <- function(data, arg, call) {
  abort_input(
    sprintf("`%s` is %s, which is not a set of rows with columns.", arg, describe(data)),
    i = "It can be:",
    "*" = "a data frame, or a list of arrays with names;",
    "*" = "a sparklyr table, or a PySpark or pandas DataFrame.",
    call = call
  )
}

# Columns retain their type: doubles are not converted to float32, as those of features are.
as_column_array <- function(x) {
  if (is_python(x)) {
    return(x)
  }
  dtype <- switch(typeof(x), integer = "int32", raw = "uint8", logical = "bool", "float64")
  numpy <- reticulate::import("numpy", convert = FALSE)
  numpy$ascontiguousarray(as_plain_array(x), dtype = dtype)
}
