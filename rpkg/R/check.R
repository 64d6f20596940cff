# Every check returns its value invisibly, so that it can be used where the value is needed.

check_count <- function(x, min = 1L, allow_null = FALSE, arg = caller_arg(x)) {
  # A factor is made of integers, and is.numeric() is FALSE for it.
  fits <- is.numeric(x) && rlang::is_scalar_integerish(x, finite = TRUE)
  fits <- fits && x >= min && x <= .Machine$integer.max
  is_large <- is_number(x) && x > .Machine$integer.max
  range <- if (is_large) sprintf("from %d to %d", min, .Machine$integer.max)
  expected <- paste("a whole number", range %||% sprintf("of at least %d", min))
  check_fits(x, fits, expected, allow_null, arg)
  invisible(if (!is.null(x)) as.integer(x))
}

check_positive <- function(x, finite = TRUE, arg = caller_arg(x)) {
  expected <- sprintf("a %snumber greater than 0", if (finite) "finite " else "")
  check_fits(x, is_number(x) && x > 0 && !(finite && is.infinite(x)), expected, FALSE, arg)
}

is_number <- function(x) is.numeric(x) && length(x) == 1L && !is.na(x)

check_flag <- function(x, arg = caller_arg(x)) {
  check_fits(x, rlang::is_bool(x), "`TRUE` or `FALSE`", FALSE, arg)
}

check_string <- function(x, allow_null = FALSE, arg = caller_arg(x)) {
  check_fits(x, rlang::is_string(x) && nzchar(x), "one string", allow_null, arg)
}

check_strings <- function(x, allow_null = FALSE, arg = caller_arg(x)) {
  fits <- is.character(x) && length(x) > 0L && !anyNA(x) && all(nzchar(x))
  check_fits(x, fits, "a vector of strings", allow_null, arg)
}

check_one_of <- function(x, choices, allow_null = FALSE, arg = caller_arg(x)) {
  quote <- if (is.character(choices)) "\"" else ""
  expected <- paste("one of", toString(encodeString(choices, quote = quote)))
  check_fits(x, length(x) == 1L && x %in% choices, expected, allow_null, arg)
}

check_fits <- function(
  x,
  fits,
  expected,
  allow_null = FALSE,
  arg = caller_arg(x),
  hint = NULL
) {
  if (!fits && !(allow_null && is.null(x))) {
    expected <- paste0(if (allow_null) "`NULL` or ", expected)
    abort_input(sprintf("`%s` must be %s, not %s.", arg, expected, describe(x)), i = hint)
  }
  invisible(x)
}

check_installed <- function(packages, why) {
  for (package in packages) {
    if (!requireNamespace(package, quietly = TRUE)) {
      problem <- sprintf("%s needs the R package %s, which is not installed.", why, package)
      abort_input(problem, i = sprintf("Run `install.packages(\"%s\")`.", package))
    }
  }
}

# Description of an unexpected value for an error: "the string \"two\"", "a list of 3".
describe <- function(x) {
  if (missing(x)) {
    "missing"
  } else if (is.null(x)) {
    "`NULL`"
  } else if (is_python(x)) {
    sprintf("a Python object of class %s", class(x)[[1L]])
  } else if (is.function(x)) {
    "a function"
  } else if (is.data.frame(x)) {
    sprintf("a data frame of %s", format_count(nrow(x), "row"))
  } else if (is.object(x)) {
    sprintf("an object of class %s", class(x)[[1L]])
  } else if (is.list(x)) {
    sprintf("a list of %d", length(x))
  } else if (!is.null(dim(x))) {
    kind <- if (is.numeric(x)) "an array" else sprintf("an array of type %s", typeof(x))
    sprintf("%s, %s", kind, paste(dim(x), collapse = " x "))
  } else if (!is.atomic(x)) {
    sprintf("an object of type %s", typeof(x))
  } else {
    describe_vector(x, type = if (is.numeric(x)) "numeric" else typeof(x))
  }
}

describe_vector <- function(x, type) {
  if (length(x) != 1L) {
    kinds <- c(character = "strings", numeric = "numbers", logical = "logical values")
    kind <- if (type %in% names(kinds)) kinds[[type]] else sprintf("values of type %s", type)
    return(sprintf("a vector of %d %s", length(x), kind))
  }
  if (is.na(x) && !is.nan(x)) {
    return("`NA`")
  }
  switch(
    type,
    character = sprintf("the string %s", encodeString(shorten(x), quote = "\"")),
    logical = sprintf("`%s`", x),
    numeric = sprintf("the number %s", format(x, digits = 15, decimal.mark = ".")),
    sprintf("a value of type %s", type)
  )
}

shorten <- function(x, width = 60L) {
  if (nchar(x) > width) paste0(substr(x, 1L, width), "...") else x
}

# Errors about unknown arguments, with what to pass instead.

# Arguments after `...` must be named. What `...` receives is misspelt, unnamed or unknown.
# Users' arguments come in `...`, and one of them may be called `frame`.
check_dots_empty <- function(..., .frame = caller_env()) {
  given <- rlang::enquos(..., .ignore_empty = "all")
  if (!length(given)) {
    return(check_given(.frame))
  }
  name <- rlang::names2(given)[[1L]]
  called <- name_called(.frame)
  if (!nzchar(name)) {
    value <- rlang::as_label(given[[1L]])
    problem <- sprintf("%s got the unnamed argument %s.", called, value)
    known <- names(formals(rlang::frame_fn(.frame)))
    positions <- paste0("`", known[seq_len(match("...", known) - 1L)], "`", collapse = ", ")
    abort_input(problem, i = sprintf("Only %s may be unnamed.", positions))
  }
  instead <- find_instead(name, setdiff(names(formals(rlang::frame_fn(.frame))), "..."))
  abort_input(sprintf("%s has no argument `%s`.", called, name), i = instead)
}

# Arguments without a default.
check_given <- function(frame = caller_env()) {
  required <- required_arguments(rlang::frame_fn(frame))
  is_absent <- function(name) eval(call("missing", as.name(name)), frame)
  absent <- Filter(is_absent, required)
  if (length(absent)) {
    named <- sub("(.*), ", "\\1 and ", toString(sprintf("`%s`", absent)))
    starts_workers <- "workers" %in% names(formals(rlang::frame_fn(frame)))
    advice <- if (absent[[1L]] != "sc" || starts_workers) required_advice[[absent[[1L]]]]
    abort_input(sprintf("%s needs %s.", name_called(frame), named), i = advice)
  }
}

required_advice <- list(
  sc = "`sc = \"local\"` starts the workers on this machine. See `?barrier_train` for clusters.",
  newdata = "Pass the rows to predict; `fitted()` predicts the training rows.",
  con = "Pass a connection from `DBI::dbConnect()`.",
  model = "Pass a fit, as from `barrier_train()`, or a Keras model."
)

# "`barrier_train()`"; "The function" if do.call() received a function without a name.
name_called <- function(frame = user_frame()) {
  called <- rlang::frame_call(frame)
  # Users call a method by the name of its generic.
  name <- if (rlang::is_call_simple(called)) sub("[.]tfdist_.*", "", rlang::call_name(called))
  if (is.null(name)) "The function" else sprintf("`%s()`", name)
}

# Python knows what to pass instead of arguments that have another form here.
find_instead <- function(name, known, otherwise = "See its help page for its arguments.") {
  advice <- if (has_pybackend()) pybackend()$bridge$suggest(name, as.list(known))
  if (is.null(advice) || startsWith(advice, "did you mean")) {
    return(name_near(name, known) %||% otherwise)
  }
  as_sentences(advice)
}

# Suggest a similar known name; NULL if there is none.
name_near <- function(name, known, quoted = "`%s`") {
  distances <- utils::adist(name, known, ignore.case = TRUE)[1L, ]
  near <- known[distances <= max(1L, nchar(name) %/% 3L)]
  near <- near[order(distances[match(near, known)])]
  begins <- if (nchar(name) > 2L) known[startsWith(known, name)]
  found <- c(near, begins)
  if (length(found)) sprintf("Did you mean %s?", sprintf(quoted, found[[1L]]))
}
