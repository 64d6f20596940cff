# Printing of fits.

#' @rdname tfdist_fit
#' @export
print.tfdist_fit <- function(x, ...) {
  check_dots_empty(...)
  counts <- list(worker = nrow(x$workers), epoch = x$epochs, row = sum(x$workers$rows))
  counts <- toString(Map(format_count, counts, names(counts)))
  cat(sprintf("<tfdist_fit> %s, %.1f s\n", counts, x$seconds))
  last <- last_metrics(x)
  figures <- as.list(rlang::set_names(show_loss(last), names(last)))
  details <- list(settings = format_settings(x), "per worker" = format_balance(x$workers))
  print_aligned(c(figures, details, list(audit = format_audit(x))))
  invisible(x)
}

# Four decimals, or four significant digits of very small and large numbers: 0.2912, 2.314e-05.
show_loss <- function(x) {
  is_shown <- is.na(x) | x == 0 | (abs(x) >= 5e-5 & abs(x) < 1e6)
  ifelse(is_shown, sprintf("%.4f", x), sprintf("%.4g", x))
}

# The last value of each metric.
last_metrics <- function(fit) {
  c(vapply(fit$history, function(values) utils::tail(values, 1L), 1), unlist(fit$metrics))
}

print_aligned <- function(texts) {
  texts <- texts[lengths(texts) > 0L]
  indent <- max(nchar(names(texts))) + 4L
  for (name in names(texts)) {
    lines <- fill_lines(texts[[name]], 88L - indent)
    starts <- c(paste0("  ", name), rep("", length(lines) - 1L))
    cat(sprintf("%s%s\n", formatC(starts, width = -indent), lines), sep = "")
  }
}

# Lines of items with commas between them, broken only between items.
fill_lines <- function(items, width) {
  add <- function(lines, item) {
    last <- lines[[length(lines)]]
    if (nchar(last) + nchar(item) + 2L <= width) {
      return(c(lines[-length(lines)], paste0(last, ", ", item)))
    }
    c(lines[-length(lines)], paste0(last, ","), item)
  }
  Reduce(add, items[-1L], items[[1L]])
}

# Settings that are not defaults, without those in the first line or without effect on the result.
format_settings <- function(fit) {
  settings <- fit$settings
  left_out <- c("workers", "epochs", "seed", "verbose", "timeout")
  defaults <- formals(barrier_train)
  is_shown <- function(name) {
    is_default <- identical(as.character(settings[[name]]), as_text(defaults[[name]]))
    name == "batch_size" || !is_default
  }
  names <- Filter(is_shown, setdiff(names(settings), left_out))
  values <- vapply(settings[names], format_setting, "")
  c(sprintf("%s = %s", names, values), sprintf("seed = %s", fit$seed %||% "not set"))
}

format_setting <- function(value) {
  if (inherits(value, "tfdist_options")) {
    return(sprintf("%s()", sub("^tfdist_", "", class(value)[[1L]])))
  }
  if (is.numeric(value) && is.null(names(value))) {
    text <- format(value, trim = TRUE, decimal.mark = ".")
    return(if (length(text) == 1L) text else sprintf("c(%s)", toString(text)))
  }
  shorten(paste(deparse(value), collapse = " "))
}

# Result of the audit.
format_audit <- function(fit) {
  audit <- fit$audit
  if (is.null(audit)) {
    return(NULL)
  }
  if (audit$steps == 0L) {
    return(if (length(audit$skipped)) paste("none:", audit$skipped))
  }
  steps <- format_count(fit$workers$steps[[1L]], "step")
  is_undecided <- isTRUE(audit$undecided > 0L)
  skipped <- if (is_undecided) paste(audit$undecided, "undecided:") else "not compared:"
  c(
    sprintf("%d of %s against one process", audit$steps, steps),
    if (length(audit$differences)) {
      sprintf("%d of them different", length(audit$differences))
    } else {
      sprintf("largest relative difference %.1g", max(audit$weights, audit$metrics))
    },
    if (length(audit$skipped)) paste(skipped, toString(audit$skipped)),
    if (length(audit$left_out)) paste("not compared:", toString(audit$left_out))
  )
}

# Ranges of rows, steps and waiting time over the workers.
format_balance <- function(workers) {
  if (nrow(workers) < 2L) {
    return(character())
  }
  c(
    format_count(workers$rows, "row"),
    format_count(workers$steps, "step"),
    if (!anyNA(workers$waited)) {
      sprintf("%s s waiting", format_range(workers$waited, function(x) sprintf("%.1f", x)))
    }
  )
}

format_range <- function(x, as_text = format_number) {
  paste(unique(vapply(range(x), as_text, "")), collapse = " to ")
}

# 12,345, regardless of `options(OutDec = )`.
format_number <- function(x) {
  format(x, big.mark = ",", decimal.mark = ".", scientific = FALSE, trim = TRUE)
}

# "1 row", "3 rows", or "1 to 3 rows".
format_count <- function(n, noun) {
  sprintf("%s %s%s", format_range(n), noun, if (max(n) == 1L) "" else "s")
}

#' @rdname tfdist_fit
#' @export
summary.tfdist_fit <- function(object, ...) {
  check_dots_empty(...)
  fields <- c("workers", "generations", "straggler", "audit")
  fields <- c(fields, "model_format", "model_uri", "model_sha256")
  own <- list(
    header = utils::capture.output(print(object)),
    history = wide_history(object),
    model_bytes = if (is.null(object$model_uri)) base64_size(object$model_base64)
  )
  structure(c(own, unclass(object)[fields]), class = "summary.tfdist_fit")
}

#' @rdname tfdist_fit
#' @export
print.summary.tfdist_fit <- function(x, ...) {
  check_dots_empty(...)
  size <- sprintf("%s bytes", format_number(x$model_bytes))
  where <- if (is.null(x$model_uri)) size else paste("in", x$model_uri)
  cat(x$header, sep = "\n")
  cat(sprintf("\nModel: %s, %s, ", x$model_format, where))
  cat(sprintf("SHA-256 %s...\n\nHistory\n", substr(x$model_sha256, 1L, 12L)))
  print(x$history, row.names = FALSE, digits = 4)
  cat("\nWorkers\n")
  print(x$workers, row.names = FALSE, digits = 3)
  if (isTRUE(nrow(x$generations) > 1L)) {
    cat("\nWorker groups, by their first epoch\n")
    print(x$generations, row.names = FALSE, right = FALSE)
  }
  if (!is.null(x$straggler)) {
    cat(sprintf("The others waited %.1f s for worker %d\n", x$straggler$seconds, x$straggler$rank))
  }
  invisible(x)
}

base64_size <- function(text) {
  end <- substring(text, nchar(text) - 1L)
  nchar(text) %/% 4L * 3L - lengths(regmatches(end, gregexpr("=", end, fixed = TRUE)))
}
