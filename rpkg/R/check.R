# Every check returns its value invisibly, so that it can be used where the value is needed.

check_count <- function(
  x,
  min = 1L,
  allow_null = FALSE,
  arg = caller_arg(x),
  call = caller_env()
) {
  if (is.null(x) && allow_null) {
    return(invisible(NULL))
  }
  # A factor is made of integers, and is.numeric() is FALSE for it.
  fits <- is.numeric(x) && rlang::is_scalar_integerish(x, finite = TRUE)
  fits <- fits && x >= min && x <= .Machine$integer.max
  if (!fits) {
    expected <- sprintf("a whole number of at least %d", min)
    if (is_number(x) && x > .Machine$integer.max) {
      expected <- sprintf("a whole number from %d to %d", min, .Machine$integer.max)
    }
    abort_expected(x, expected, allow_null, arg, call)
  }
  invisible(as.integer(x))
}

check_positive <- function(x, finite = TRUE, arg = caller_arg(x), call = caller_env()) {
  if (!is_number(x) || x <= 0 || (finite && is.infinite(x))) {
    expected <- sprintf("a %snumber greater than 0", if (finite) "finite " else "")
    abort_expected(x, expected, FALSE, arg, call)
  }
  invisible(as.double(x))
}

check_fraction <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (!is_number(x) || x < 0 || x >= 1) {
    abort_expected(x, "a number from 0 to below 1", FALSE, arg, call)
  }
  invisible(as.double(x))
}

is_number <- function(x) is.numeric(x) && length(x) == 1L && !is.na(x)

check_flag <- function(x, allow_null = FALSE, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x) && allow_null) {
    return(invisible(NULL))
  }
  if (!rlang::is_bool(x)) {
    abort_expected(x, "`TRUE` or `FALSE`", allow_null, arg, call)
  }
  invisible(x)
}

check_string <- function(x, allow_null = FALSE, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x) && allow_null) {
    return(invisible(NULL))
  }
  if (!rlang::is_string(x) || !nzchar(x)) {
    abort_expected(x, "one string", allow_null, arg, call)
  }
  invisible(x)
}

check_strings <- function(x, allow_null = FALSE, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x) && allow_null) {
    return(invisible(NULL))
  }
  if (!is.character(x) || length(x) == 0L || anyNA(x) || !all(nzchar(x))) {
    abort_expected(x, "a vector of strings", allow_null, arg, call)
  }
  invisible(x)
}

check_one_of <- function(
  x,
  choices,
  allow_null = FALSE,
  arg = caller_arg(x),
  call = caller_env()
) {
  if (is.null(x) && allow_null) {
    return(invisible(NULL))
  }
  if (length(x) != 1L || !x %in% choices) {
    expected <- paste("one of", toString(encodeString(choices, quote = quote_for(choices))))
    abort_expected(x, expected, allow_null, arg, call)
  }
  invisible(x)
}

check_installed <- function(package, why, call = caller_env()) {
  if (!requireNamespace(package, quietly = TRUE)) {
    abort_input(
      c(
        sprintf("%s needs the R package %s, which is not installed.", why, package),
        i = sprintf("Run `install.packages(\"%s\")`.", package)
      ),
      call = call
    )
  }
}

abort_expected <- function(x, expected, allow_null, arg, call, hint = NULL) {
  null_or <- if (allow_null) "`NULL` or " else ""
  abort_input(
    c(sprintf("`%s` must be %s%s, not %s.", arg, null_or, expected, describe(x)), i = hint),
    call = call
  )
}

quote_for <- function(choices) if (is.character(choices)) "\"" else ""
