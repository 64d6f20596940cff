# The result of plan().

# From Python's Plan.
new_plan <- function(plan) {
  fields <- plan$to_dict()
  fields$workers <- frame_of(
    fields$workers,
    list(rank = NA_integer_, role = "", place = "", rows = NA_integer_)
  )
  fields$later <- as.character(unlist(fields$later))
  structure(c(fields, list(text = plan$`__str__`())), class = "tfdist_plan")
}

# Both packages may be attached, and then `plan(multisession)` was meant for the other.
check_no_strategy <- function(sc, call = caller_env()) {
  names <- c("sequential", "multisession", "multicore", "cluster", "mirai_multisession", "callr")
  first <- if (is.list(sc) && !is.object(sc) && length(sc)) sc[[1L]] else sc
  if (is.function(first) || (is.character(first) && all(first %in% names))) {
    abort_input(
      "`tfdist::plan()` shows what a training would start, and takes no strategy of futures.",
      i = "Call `future::plan()`.",
      call = call
    )
  }
}

#' @export
print.tfdist_plan <- function(x, ...) {
  check_dots_empty(...)
  cat(x$text, "\n", sep = "")
  invisible(x)
}
