# Calls of Python's functions: their options, and the values that R's functions make for them.

# A function with the arguments of `f` and, after these, options of a call.
take_options <- function(f, options) {
  options <- setdiff(options, names(formals(f)))
  rlang::new_function(c(formals(f), option_defaults[options]), body(f), environment(f))
}

# A function that returns a value for an argument: a classed list. Python checks it: now if it is
# already running, otherwise at its first use. `kind` is another class of the value.
new_maker <- function(name, kind = NULL) {
  arguments <- maker_arguments[[name]]
  own <- setdiff(names(arguments), "...")
  class <- paste0("tfdist_", c(name, kind))
  check <- if ("..." %in% names(arguments)) quote(check_dots_empty(...)) else quote(check_given())
  body <- bquote({
    .(check)
    new_options(mget(.(own)), .(class))
  })
  rlang::new_function(arguments, body, environment(new_options))
}

new_options <- function(fields, class) {
  check_values(fields)
  made <- structure(fields, class = c(class, "tfdist_options"))
  # Observers hold R functions, which Python gets when the training starts.
  if (!is.null(the$pybackend) && !inherits(made, "tfdist_observer")) {
    as_python_options(made)
  }
  made
}

# Python has neither missing values, except NA in `tensors` for any length, nor a name twice. The
# first value of a rule has no name.
check_values <- function(values, shown = names(values)) {
  for (i in which(names(values) != "tensors")) {
    value <- values[[i]]
    if ((is.atomic(value) || rlang::is_bare_list(value)) && anyNA(unlist(value))) {
      abort_input(sprintf("`%s` must not have missing values.", shown[[i]]))
    }
    check_kind(value, names(values)[[i]], shown[[i]])
    is_rule <- names(values)[[i]] %in% c("scale_lr", "prune")
    if (!is_rule && is.vector(value) && !is.null(names(value)) && !has_unique_names(value)) {
      abort_input(sprintf("`%s` must have a different name for each value.", shown[[i]]))
    }
  }
}

# What would mean something else in Python: a vector of length 0 is NULL there, which is the default
# of many arguments, and a difftime is a number without its unit.
check_kind <- function(value, name, shown) {
  if (is.atomic(value) && !is.null(value) && !length(value)) {
    abort_input(sprintf("`%s` must not be a vector of length 0.", shown))
  }
  if (inherits(value, "difftime")) {
    problem <- sprintf("`%s` must not be a difftime.", shown)
    advice <- "Pass a number in the unit of its help page, or text such as \"10min\"."
    abort_input(problem, i = advice)
  }
  maker <- if (name == "workers") "elastic" else name
  if (is.function(value) && maker %in% names(python_makers)) {
    problem <- sprintf("`%s` must not be a function.", shown)
    abort_input(problem, i = sprintf("Call it: `%s = %s(...)`.", shown, maker))
  }
}

#' @export
print.tfdist_options <- function(x, ...) {
  cat(sprintf("<%s>\n", class(x)[[1L]]))
  values <- vapply(unclass(x), function(value) paste(deparse(value), collapse = " "), "")
  cat(sprintf("  %s = %s\n", format(names(values)), shorten_each(values)), sep = "")
  invisible(x)
}

shorten_each <- function(texts) vapply(texts, shorten, "", USE.NAMES = FALSE)

# The value of an option as Python takes it. A named vector becomes a dict, as a named list does.
as_python_setting <- function(value) {
  if (inherits(value, "tfdist_options")) {
    return(as_python_options(value))
  }
  if (is.factor(value)) {
    value <- as.character(value)
  }
  if (is.atomic(value) && !is.null(names(value))) {
    value <- as.list(value)
  }
  # Python does not expand `~`.
  null_if_empty(if (rlang::is_string(value)) path.expand(value) else value)
}

as_python_settings <- function(settings) {
  plain <- lapply(settings[names(settings) != "callbacks"], as_python_setting)
  callbacks <- as_python_callbacks(settings$callbacks)
  c(plain, if (!is.null(callbacks)) list(callbacks = callbacks))
}

as_python_options <- function(options) {
  if (is.null(options)) {
    return(NULL)
  }
  maker <- sub("^tfdist_", "", class(options)[[1L]])
  fields <- unclass(options)
  if (maker == "data_options") {
    fields <- as_python_data_options(fields)
  } else if (maker == "exchange") {
    fields["scale_lr"] <- list(as_python_rule(fields$scale_lr, "ScaleLearningRate"))
  }
  # reticulate converts a vector of length one to a string.
  for (name in intersect(c("ssh_options", "tags"), names(fields))) {
    fields[name] <- list(as_list_or_null(fields[[name]]))
  }
  fields <- lapply(fields, as_python_setting)
  if (inherits(options, "tfdist_launcher")) {
    fields <- drop_null(fields)
  }
  call_python(pybackend()[[python_makers[[maker]]]], !!!fields)
}

# `list("linear", warmup_epochs = 5)` as an object of Python's class.
as_python_rule <- function(rule, class) {
  if (!rlang::is_bare_list(rule)) {
    return(rule)
  }
  check_values(rule[nzchar(rlang::names2(rule))])
  call_python(pybackend()[[class]], !!!lapply(rule, as_python_setting))
}

# Values of the options with these names, taken from the calling function and checked by Python.
# Without Python, the call fails when it needs it.
check_arguments <- function(names, frame = caller_env()) {
  values <- mget(names, envir = frame)
  if ("callbacks" %in% names) {
    values["callbacks"] <- list(check_callbacks(values$callbacks, "callbacks"))
  }
  plain <- values[setdiff(names, "callbacks")]
  shown <- vapply(names(plain), name_argument, "", frame = frame)
  check_values(plain, shown)
  if (has_pybackend()) {
    takes_elastic <- exists("validation_data", frame, inherits = FALSE)
    call_bridge("check_options", lapply(plain, as_python_setting), as.list(shown), takes_elastic)
  }
  values
}

check_callbacks <- function(x, arg = caller_arg(x)) {
  is_callback <- function(x) is_python(x) || is_observer(x) || inherits(x, "tfdist_tracker")
  if (is_callback(x)) {
    x <- list(x)
  }
  hint_observer <- function(x) {
    if (is.function(x)) {
      "Pass `observer(on_epoch_end = )`, which calls your function in this session."
    }
  }
  expected <- "a list of Keras callbacks (Python objects), observers and trackers"
  check_fits(x, is.list(x), expected, TRUE, arg, hint_observer(x))
  one <- "a Keras callback (a Python object), an observer or a tracker"
  for (i in seq_along(x)) {
    element <- sprintf("%s[[%d]]", arg, i)
    check_fits(x[[i]], is_callback(x[[i]]), one, FALSE, element, hint_observer(x[[i]]))
  }
  invisible(if (length(x)) unname(x))
}

check_custom_objects <- function(x, arg = caller_arg(x)) {
  is_dict <- inherits(x, "python.builtin.dict")
  fits <- is_dict || (is_r_list(x) && rlang::is_named(x))
  check_fits(x, fits, "a named list of Python classes or functions", TRUE, arg)
}
