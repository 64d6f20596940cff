# A fit for tidymodels: methods for generics of the package generics.

#' Tidy a fit
#'
#' Methods for functions in the generics package, which broom and tidymodels also export.
#'
#' @param x A [tfdist_fit].
#' @param new_data As `newdata` in [predict.tfdist_fit()]: a data frame or a sparklyr table.
#' @param ... For `augment()`: arguments of [predict.tfdist_fit()], such as `type`.
#'
#' @return Tibbles, or data frames if the tibble package is not installed.
#' * `tidy()`: the history, as in `as.data.frame()`;
#' * `glance()`: one row with `workers`, `epochs`, `rows`, `seconds`, `seed` and the last value of
#'   each metric;
#' * `augment()`: `new_data` with the predictions as additional columns; a `tbl_spark` for a Spark
#'   table.
#' @name tidy.tfdist_fit
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && rlang::is_installed("generics")
#' fit <- train_mnist("local", workers = 1, epochs = 2, limit = 640, verbose = 0)
#' generics::tidy(fit)
#' generics::glance(fit)
NULL

#' @rdname tidy.tfdist_fit
#' @exportS3Method generics::tidy
tidy.tfdist_fit <- function(x, ...) {
  check_dots_empty(...)
  as_rows(as.list(as.data.frame(x)))
}

#' @rdname tidy.tfdist_fit
#' @exportS3Method generics::glance
glance.tfdist_fit <- function(x, ...) {
  check_dots_empty(...)
  training <- list(
    workers = nrow(x$workers),
    epochs = x$epochs,
    rows = sum(x$workers$rows),
    seconds = x$seconds,
    seed = x$seed %||% NA_integer_
  )
  as_rows(c(training, as.list(last_metrics(x))))
}

#' @rdname tidy.tfdist_fit
#' @exportS3Method generics::augment
augment.tfdist_fit <- function(x, new_data, ...) {
  check_given()
  if (inherits(new_data, "tbl_spark")) {
    return(stats::predict(x, new_data, ...))
  }
  check_no_database(new_data, "new_data", rlang::current_env(), predicts = TRUE)
  check_fits(new_data, is.data.frame(new_data), "a data frame or a Spark table")
  predicted <- stats::predict(x, new_data, ...)
  if (!is.data.frame(predicted)) {
    abort_input(
      "`type = \"raw\"` gives an array, not columns.",
      i = "Leave `type` out, or use \"class\" or \"prob\"."
    )
  }
  taken <- intersect(names(predicted), names(new_data))
  if (length(taken)) {
    abort_input(
      sprintf("`new_data` has a column \"%s\" already.", taken[[1L]]),
      i = "Rename or remove it."
    )
  }
  as_rows(c(as.list(new_data), as.list(predicted)), nrow(predicted))
}
