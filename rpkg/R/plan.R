# The result of plan().

# From Python's Plan.
new_plan <- function(plan) {
  fields <- plan$to_dict()
  column <- function(name, none) {
    vapply(fields$workers, function(worker) worker[[name]] %||% none, none)
  }
  fields$workers <- data.frame(
    rank = column("rank", NA_integer_),
    role = column("role", ""),
    place = column("place", ""),
    rows = column("rows", NA_integer_)
  )
  fields$later <- as.character(unlist(fields$later))
  structure(c(fields, list(text = plan$`__str__`())), class = "tfdist_plan")
}

#' @export
print.tfdist_plan <- function(x, ...) {
  check_dots_empty(...)
  cat(x$text, "\n", sep = "")
  invisible(x)
}
