#' Measure how training scales with the number of workers
#'
#' Trains with different numbers of workers and compares their step times. In strong scaling, the
#' workers share one batch; in weak scaling, each has its own batch. The step time is broken down
#' into data, compute, communication, and waiting for other workers.
#'
#' @param train A function of `workers` and `batch_size` that passes both to [barrier_train()] and
#'   returns its fit; or the path to a script (R or Python) that calls it. A script runs in its own
#'   process, where `workers` and `batch_size` override the values in the script, and no checkpoint
#'   is saved. A training run should take at least 50 steps; the first three are not measured.
#' @param workers Numbers of workers to measure.
#' @param ... Must be empty.
#' @param mode `"strong"`, `"weak"` or `"both"`.
#' @param batch_size Number of rows in the shared batch (strong scaling) or in each worker's batch
#'   (weak scaling). For strong scaling, it must be divisible by every number of workers. `NULL`:
#'   32, or the value in the script.
#' @param steps Number of steps that a script trains for, in a single epoch. `NULL`: the number in
#'   the script.
#' @param repeats Number of runs of each configuration, interleaved.
#' @param arguments Command-line arguments for the script.
#' @param project Largest number of workers to predict step times for, with a model that is fitted
#'   to the measured steps. `NULL`: no prediction.
#' @param verbose 1 prints one line per training run; 0 prints nothing.
#' @return A data frame with one row for each combination of mode and number of workers: `mode`,
#'   `workers`, `batch_size` (rows per worker), `seconds` (per step) and its parts `data`,
#'   `compute`, `communication` and `waiting`, `rows_per_second`, `speedup`, `efficiency` (1 is
#'   linear), `is_crowded` (more workers than cores), `steps` (number of measured steps), `jitter`
#'   (how much the duration of a worker's own part of a step varies, as the standard deviation of
#'   its logarithm) and `is_projected`. What was not measured of a projected row is `NA`. Speedups
#'   are relative to the smallest number of workers, which is assumed to scale linearly. `print()`
#'   shows the most important columns.
#' @export
#' @examples
#' \dontrun{
#' train <- function(workers, batch_size) {
#'   barrier_train("local", model, list(x, y), workers = workers, batch_size = batch_size)
#' }
#' bench_scale(train, workers = c(1, 2, 4), batch_size = 64, project = 480)
#' bench_scale("train.R", workers = c(1, 2, 4))
#' }
bench_scale <- function(
  train,
  workers = c(1, 2, 4),
  ...,
  mode = "both",
  batch_size = NULL,
  steps = NULL,
  repeats = 1,
  arguments = character(),
  project = NULL,
  verbose = 1
) {
  check_dots_empty(...)
  check_train(train)
  if (!is.null(project)) {
    check_count(project, min = 2L)
    if (length(unique(workers)) < 2L) {
      abort_input("`project` needs at least two values in `workers`, e.g. `c(1, 2, 4)`.")
    }
  }
  result <- call_python(
    pybackend()$bench_scale,
    if (is.function(train)) python_train(train) else path.expand(train),
    as.list(workers),
    !!!mget(c("mode", "batch_size", "steps", "repeats", "verbose")),
    arguments = as.list(as.character(arguments))
  )
  measured <- cbind(scaling_frame(result$records), is_projected = FALSE)
  class(measured) <- c("tfdist_scaling", class(measured))
  projected <- if (!is.null(project)) call_python(result$project, project)$records
  if (!length(projected)) {
    return(measured)
  }
  projected <- cbind(scaling_frame(projected), is_projected = TRUE)
  columns <- union(names(measured), names(projected))
  complete <- function(rows) {
    rows[setdiff(columns, names(rows))] <- NA
    rows[columns]
  }
  rbind(complete(measured), complete(projected))
}

check_train <- function(train) {
  is_script <- rlang::is_string(train)
  expected <- "a function that calls `barrier_train()`, or the path of a script"
  check_fits(train, is_script || (is.function(train) && !is_python(train)), expected)
  takes <- if (!is_script) names(formals(args(train)))
  if (!is_script && !"..." %in% takes && !all(c("workers", "batch_size") %in% takes)) {
    needed <- "`train` must take `workers` and `batch_size`"
    abort_input(paste0(needed, ", and pass both on to `barrier_train()`."))
  }
}

#' @export
print.tfdist_scaling <- function(x, ...) {
  needed <- c("mode", "workers", "batch_size", "seconds", "speedup", "efficiency")
  needed <- c(needed, "data", "compute", "communication", "waiting")
  if (!all(needed %in% names(x)) || !nrow(x)) {
    return(NextMethod())
  }
  crowded <- x$is_crowded %in% TRUE
  shown <- data.frame(
    mode = x$mode,
    workers = paste0(x$workers, ifelse(crowded, "*", "")),
    rows = format(round(x$batch_size, 1), decimal.mark = "."),
    ms = format(round(1000 * x$seconds, 2), nsmall = 2, decimal.mark = "."),
    speedup = sprintf("%.2f", x$speedup),
    efficiency = sprintf("%.2f", x$efficiency)
  )
  parts <- x[c("data", "compute", "communication", "waiting")]
  shares <- apply(as.matrix(parts) / x$seconds, 1L, function(share) {
    if (anyNA(share)) "(projected)" else paste(sprintf("%.0f", 100 * share), collapse = "/")
  })
  shown[["parts, %"]] <- shares
  print(shown, row.names = FALSE)
  if (any(crowded)) {
    cat("* more workers than cores: workers share cores and slow each other down\n")
  }
  cat("parts: data/compute/communication/waiting; all columns: as.data.frame()\n")
  invisible(x)
}

#' @export
as.data.frame.tfdist_scaling <- function(x, ...) {
  class(x) <- setdiff(class(x), "tfdist_scaling")
  x
}

# The function that Python calls. It returns Python's result object, which the fit contains.
python_train <- function(train) {
  function(workers, batch_size) {
    fit <- train(workers = as.integer(workers), batch_size = as.integer(batch_size))
    if (inherits(fit, "tfdist_fit")) fit$decoded$result else fit
  }
}

scaling_frame <- function(records) as.data.frame(do.call(rbind.data.frame, records))
