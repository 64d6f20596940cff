# Calls a function with Python's input in `exchange`, and puts its value or error there.
function() {
  exchange <- reticulate::import("pybackend.core.r.function", convert = FALSE)$exchange
  item <- function(name) reticulate::py_to_r(reticulate::py_get_item(exchange, name))
  put <- function(name, value) reticulate::py_set_item(exchange, name, value)

  # The calls between the user's function and the error, without those of this file.
  described <- function(calls, depth) {
    calls <- utils::head(calls, -2L)[-seq_len(depth)]
    lines <- vapply(calls, function(call) deparse(call, 500L, nlines = 1L)[[1L]], "")
    lines <- ifelse(nchar(lines) > 120L, paste0(substr(lines, 1L, 117L), "..."), lines)
    # The call of the function itself has all arguments written out. A function sent by the R
    # package contains the user's.
    lines <- replace(lines, seq_along(lines) == 1L, "f(...)")
    lines <- lines[!(lines == "f(...)" & c(lines[-1L], "") == "f(...)")]
    paste(sprintf("%3d: %s", seq_along(lines), lines), collapse = "\n")
  }

  attach_packages <- function() {
    for (package in item("packages")) {
      if (!requireNamespace(package, quietly = TRUE)) {
        stop(
          "the R package ", package, " is not installed on ", Sys.info()[["nodename"]],
          " (looked in ", toString(.libPaths()), "): run install.packages(\"", package, "\") there",
          call. = FALSE
        )
      }
      suppressPackageStartupMessages(library(package, character.only = TRUE))
    }
  }

  # Python would get -2147483648 for a missing integer, and True for a missing logical.
  has_missing <- function(x) {
    if (is.list(x)) {
      return(any(vapply(x, has_missing, NA)))
    }
    is.atomic(x) && !is.double(x) && !is.complex(x) && anyNA(x)
  }

  # Rows in R's style: ctx$feed(32) returns a function, and each call of it returns a batch.
  with_feed <- function(argument) {
    if (!is.list(argument) || !is.function(argument[["feed"]])) {
      return(argument)
    }
    open <- argument[["feed"]]
    argument[["feed"]] <- function(batch_size = 32) {
      batches <- open(batch_size)
      function() {
        batch <- reticulate::iter_next(batches)
        # A one-dimensional array of Python has a dimension in R.
        if (!is.null(batch)) {
          lapply(batch, function(x) if (length(dim(x)) == 1L) as.vector(x) else x)
        }
      }
    }
    argument
  }

  run <- function() {
    set.seed(item("seed"))
    # Show warnings at once: otherwise R shows them at the top level, which is never reached.
    options(warn = 1L)
    attach_packages()
    code <- item("code")
    f <- if (is.character(code)) eval(parse(text = code, encoding = "UTF-8"), globalenv()) else unserialize(code)
    arguments <- lapply(item("arguments"), with_feed)
    # do.call() has a frame of its own.
    depth <<- sys.nframe() + 1L
    value <- do.call("f", arguments, quote = TRUE)
    if (has_missing(value)) {
      stop("the result has missing values (NA), which do not exist in Python", call. = FALSE)
    }
    put("value", value)
  }

  depth <- 0L
  calls <- ""
  tryCatch(
    withCallingHandlers(run(), error = function(error) calls <<- described(sys.calls(), depth)),
    error = function(error) {
      put("error", conditionMessage(error))
      put("calls", calls)
    }
  )
  invisible()
}
