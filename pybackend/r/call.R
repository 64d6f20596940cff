# One call of a function: what Python put into `exchange` goes in, value or error comes out.
function() {
  exchange <- reticulate::import("pybackend.r.function", convert = FALSE)$exchange
  item <- function(name) reticulate::py_to_r(reticulate::py_get_item(exchange, name))
  put <- function(name, value) reticulate::py_set_item(exchange, name, value)

  # The calls between the user's function and the error, without those that brought us here.
  described <- function(calls, depth) {
    calls <- utils::head(calls, -2L)[-seq_len(depth)]
    lines <- vapply(calls, function(call) deparse(call, 500L, nlines = 1L)[[1L]], "")
    lines <- ifelse(nchar(lines) > 120L, paste0(substr(lines, 1L, 117L), "..."), lines)
    # The function itself was called with the arguments written out; one sent by the R package has
    # the user's inside.
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

  # Rows as R's users take them: ctx$feed(32) gives a function, of which each call gives a batch.
  with_feed <- function(argument) {
    if (!is.list(argument) || !is.function(argument[["feed"]])) {
      return(argument)
    }
    open <- argument[["feed"]]
    argument[["feed"]] <- function(batch_size = 32) {
      batches <- open(batch_size)
      function() {
        batch <- reticulate::iter_next(batches)
        # A vector of Python has a dimension.
        if (!is.null(batch)) {
          lapply(batch, function(x) if (length(dim(x)) == 1L) as.vector(x) else x)
        }
      }
    }
    argument
  }

  run <- function() {
    set.seed(item("seed"))
    # At once: the top level, at which R shows warnings else, is never reached.
    options(warn = 1L)
    attach_packages()
    code <- item("code")
    f <- if (is.character(code)) eval(parse(text = code, encoding = "UTF-8"), globalenv()) else unserialize(code)
    arguments <- lapply(item("arguments"), with_feed)
    # do.call() has a frame of its own.
    depth <<- sys.nframe() + 1L
    value <- do.call("f", arguments, quote = TRUE)
    if (has_missing(value)) {
      stop("the result holds missing values (NA), which Python does not know", call. = FALSE)
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
