# Errors about unknown arguments, with what to pass instead.

# Arguments after `...` must be named. What `...` receives is misspelt, unnamed or unknown.
check_dots_empty <- function(..., call = caller_env()) {
  given <- rlang::enquos(..., .ignore_empty = "all")
  if (!length(given)) {
    return(check_given(call))
  }
  name <- rlang::names2(given)[[1L]]
  called <- name_called(call)
  if (!nzchar(name)) {
    value <- rlang::as_label(given[[1L]])
    abort_input(
      sprintf("%s got the unnamed argument %s.", called, value),
      i = sprintf("Only %s may be unnamed.", list_positions(call)),
      call = call
    )
  }
  known <- names(formals(rlang::frame_fn(call)))
  instead <- find_instead(name, setdiff(known, "..."))
  abort_input(sprintf("%s has no argument `%s`.", called, name), i = instead, call = call)
}

# Arguments without a default.
check_given <- function(call = caller_env()) {
  required <- required_arguments(rlang::frame_fn(call))
  is_absent <- function(name) eval(as.call(list(quote(missing), as.name(name))), call)
  absent <- Filter(is_absent, required)
  if (length(absent)) {
    named <- sub("(.*), ", "\\1 and ", toString(sprintf("`%s`", absent)))
    starts_workers <- "workers" %in% names(formals(rlang::frame_fn(call)))
    advice <- if (absent[[1L]] != "sc" || starts_workers) required_advice[[absent[[1L]]]]
    abort_input(sprintf("%s needs %s.", name_called(call), named), i = advice, call = call)
  }
}

required_advice <- list(
  sc = "`sc = \"local\"` starts the workers on this machine. See `?barrier_train` for clusters.",
  newdata = "Pass the rows to predict; `fitted()` predicts the training rows.",
  con = "Pass a connection from `DBI::dbConnect()`.",
  model = "Pass a fit, as from `barrier_train()`, or a Keras model."
)

# "`barrier_train()`"; "The function" if do.call() received a function without a name.
name_called <- function(frame) {
  called <- rlang::frame_call(frame)
  # Users call a method by the name of its generic.
  name <- if (rlang::is_call_simple(called)) sub("[.]tfdist_.*", "", rlang::call_name(called))
  if (is.null(name)) "The function" else sprintf("`%s()`", name)
}

list_positions <- function(frame) {
  known <- names(formals(rlang::frame_fn(frame)))
  paste0("`", known[seq_len(match("...", known) - 1L)], "`", collapse = ", ")
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
