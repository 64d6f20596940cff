#' Show what a training run would start
#'
#' `plan()` performs all checks of [barrier_train()] without starting any workers. Spark runs only
#' the jobs that collect the distinct values of text columns.
#'
#' @inheritParams barrier_train
#' @param submit `TRUE`, or the `folder` of [submit_training()]: plan a training that is handed
#'   over.
#' @return An object of class `tfdist_plan`, which prints as text. Its elements are `launcher`,
#'   `workers` (a data frame of `rank`, `role`, `place` and `rows`), `data`, `validation_data`,
#'   `rows`, `steps_per_epoch`, `which_rows`, `model`, `settings`, `documents` (what would be
#'   submitted to Kubernetes or Slurm), `later` (what is known only after training has started), and
#'   `driver` (where the process runs that would drive the training, with `submit`).
#' @section Errors:
#' The errors that [barrier_train()] raises before it starts anything.
#' @section With the package future:
#' The package future has a `plan()`, too. R calls that of the package that was attached last. Write
#' `tfdist::plan()` and `future::plan()` in code that uses both. A strategy of futures, as in
#' `plan(multisession)`, raises an error here that explains it.
#' @seealso [barrier_train()]
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && requireNamespace("keras3")
#' new_model <- function() {
#'   keras3::keras_model_sequential(input_shape = 4) |>
#'     keras3::layer_dense(3, activation = "softmax") |>
#'     keras3::compile("adam", "sparse_categorical_crossentropy")
#' }
#' tfdist::plan("local", new_model, iris, Species ~ ., workers = 2, epochs = 3)
plan <- take_options(
  function(sc, model = NULL, data = NULL, formula = NULL, ..., model_fn = NULL, submit = FALSE) {
    if (!missing(sc)) {
      check_no_strategy(sc)
    }
    check_dots_empty(...)
    fits <- rlang::is_bool(submit) || (rlang::is_string(submit) && nzchar(submit))
    check_fits(submit, fits, "`TRUE`, `FALSE` or one string")
    training <- prepare_training(barrier_train_options)
    if (!isFALSE(submit)) {
      share_address()
    }
    submit <- if (isTRUE(submit)) jobs_folder() %||% TRUE else submit
    new_plan(run_training(training, pybackend()$plan, submit = submit))
  },
  barrier_train_options
)

# The result of plan(), from Python's Plan.
new_plan <- function(plan) {
  fields <- plan$to_dict()
  absent <- list(rank = NA_integer_, role = "", place = "", rows = NA_integer_)
  fields$workers <- frame_of(fields$workers, absent)
  fields$later <- as.character(unlist(fields$later))
  structure(c(fields, list(text = plan$`__str__`())), class = "tfdist_plan")
}

# Both packages may be attached, and then `plan(multisession)` was meant for the other.
check_no_strategy <- function(sc) {
  names <- c("sequential", "multisession", "multicore", "cluster", "mirai_multisession", "callr")
  first <- if (is.list(sc) && !is.object(sc) && length(sc)) sc[[1L]] else sc
  if (is.function(first) || (is.character(first) && all(first %in% names))) {
    abort_input(
      "`tfdist::plan()` shows what a training would start, and takes no strategy of futures.",
      i = "Call `future::plan()`."
    )
  }
}

#' @export
print.tfdist_plan <- function(x, ...) {
  check_dots_empty(...)
  cat(x$text, "\n", sep = "")
  invisible(x)
}
