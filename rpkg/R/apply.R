#' Run an R function once per worker
#'
#' Runs `f(ctx, ...)` in `workers` R processes at the same time and returns the value of each.
#' `TF_CONFIG` is set and its ports are reserved, so TensorFlow's own distribution strategies work
#' without further setup. Use it for custom training loops; [barrier_train()] does not need it.
#'
#' On a sparklyr connection, the function runs under `sparklyr::spark_apply(barrier = TRUE)`: the
#' executors need R with the reticulate package, and Python with the packages that `f` uses.
#' Elsewhere, rpy2 runs it in a Python process, so the workers' machines need R, reticulate and
#' rpy2. They never need tfdist itself.
#'
#' @inheritParams barrier_train
#' @param sc Where the workers run, as in [barrier_train()]. Their machines need the software listed
#'   above.
#' @param f A function whose first argument is the worker's context: a list of `rank` (from 0),
#'   `world_size`, `addresses` (`"host:port"` of all workers), `tf_config` (the text of
#'   `TF_CONFIG`), `role` and `index`, and three functions. `barrier()` waits for all workers, and
#'   `all_gather(value)` returns the values of all workers; every worker must call each of them the
#'   same number of times. `feed()` reads rows, as described for `data`. The variables that `f`
#'   uses, from its own environment and from the workspace, are sent with it, as are all functions
#'   in the workspace. Packages that `f` uses are attached on the workers if they are attached in
#'   this session. Variables that are named only in a string, as in `get("x")`, or used only in an
#'   R6 object in the workspace, are not found. Python objects are not sent: create them inside the
#'   function.
#' @param ... Additional arguments for `f`.
#' @param packages Names of additional packages to attach on the workers.
#' @param roles Number of workers by role, such as `c(chief = 1, worker = 2, ps = 1)`, instead of
#'   `workers`. Ranks follow this order, and `TF_CONFIG` gives each worker's role. As soon as `f`
#'   returns on the chief (or on all workers, if there is no chief), the evaluator and the parameter
#'   servers, which need not return, are stopped. With both a chief and parameter servers, workers
#'   that do not return within 3 seconds are stopped, too. The value of a stopped worker is `NULL`.
#' @param data Rows to distribute across the workers, each row to exactly one worker: a data frame
#'   of numbers or logicals, a named list of arrays with rows along the first dimension, a sparklyr
#'   table, or a PySpark or pandas DataFrame. `feed <- ctx$feed(batch_size)` returns a function.
#'   Each call to this function returns the next rows, as a list with a vector or array for each
#'   column, or `NULL` at the end. If you also pass `roles`, it may contain only chiefs and workers.
#' @param verbose 2 shows the workers' output; 0 and 1 do not.
#' @param timeout As in [barrier_train()]. The function `f` itself has no time limit.
#' @return A list with one value per worker, in rank order. Vectors, factors, lists and data frames
#'   retain their attributes. Return a Keras model as
#'   `reticulate::import("pybackend")$model_to_base64(model)`.
#' @section Errors:
#' An error in `f` stops all workers and is raised in this session as a `tfdist_error_worker_failed`
#' with the message, the `rank`, the `host`, and R's call stack as `traceback`. See [tfdist_error].
#' @export
#' @examples
#' \dontrun{
#' sc <- sparklyr::spark_connect(master = "yarn")
#' barrier_apply(sc, function(ctx) c(ctx$rank, Sys.getpid()), workers = 3)
#'
#' # Each worker adds up its own rows, 32 at a time.
#' sums <- barrier_apply("local", workers = 2, data = mtcars, function(ctx) {
#'   feed <- ctx$feed(32)
#'   total <- 0
#'   while (!is.null(batch <- feed())) {
#'     total <- total + sum(batch$mpg)
#'   }
#'   total
#' })
#' }
barrier_apply <- function(
  sc,
  f,
  workers = getOption("tfdist.workers"),
  ...,
  packages = NULL,
  roles = NULL,
  data = NULL,
  resources = NULL,
  verbose = getOption("tfdist.verbose", 2),
  timeout = 300
) {
  check_given()
  route <- check_sc(sc)
  check_worker_function(f)
  check_strings(packages, allow_null = TRUE)
  roles <- check_roles(roles)
  # The counts of the roles replace the option `tfdist.workers`.
  if (!is.null(roles) && missing(workers)) {
    workers <- NULL
  }
  settings <- check_arguments(c("workers", "resources", "verbose", "timeout"))
  data <- check_apply_data(data, route)

  fn <- as_r_function(f, packages, pack_value, extra = list(...), arg = "f")
  run <- function(rows) {
    plain <- c(as_python_settings(settings), list(roles = roles, data = rows))
    call_python(pybackend()$barrier_run, open_r_workers(route), fn, !!!plain)
  }
  session <- if (identical(data$kind, "table")) open_session(route)
  values <- with_python_data(data, session, run)
  lapply(values, function(value) if (!is.null(value)) unpack_value(value))
}

check_worker_function <- function(f, arg = caller_arg(f)) {
  fits <- is.function(f) && !is_python(f) && !is.primitive(f)
  check_fits(f, fits, "an R function of the worker's context, `function(ctx)`", FALSE, arg)
  if (length(formals(f)) == 0L) {
    problem <- sprintf("`%s` must take an argument, the worker's context.", arg)
    abort_input(problem, i = "Write `function(ctx)`; `ctx$rank` is the number of the worker.")
  }
}

# Counts of workers by role, as a list for Python, which checks the names and combinations.
check_roles <- function(x, arg = caller_arg(x)) {
  counts <- unlist(x)
  fits <- has_unique_names(x) && length(counts) == length(x) && is.numeric(counts)
  fits <- fits && rlang::is_integerish(counts, finite = TRUE) && all(counts >= 0)
  expected <- "counts of workers by role, e.g. `c(chief = 1, worker = 2)`"
  check_fits(x, fits, expected, TRUE, arg)
  invisible(as_list_or_null(counts))
}

# The argument `data` of barrier_apply(): named columns whose rows the function iterates over.
check_apply_data <- function(data, route, arg = caller_arg(data)) {
  if (is.null(data)) {
    return(NULL)
  }
  if (is_python(data)) {
    return(list(kind = "python", value = data))
  }
  if (inherits(data, "tbl_spark")) {
    check_has_spark(route, arg)
    return(list(kind = "table", value = data))
  }
  if (!is.list(data)) {
    abort_input(
      sprintf("`%s` is %s, which is not a set of rows with columns.", arg, describe(data)),
      i = "It can be:",
      "*" = "a data frame, or a list of arrays with names;",
      "*" = "a sparklyr table, or a PySpark or pandas DataFrame."
    )
  }
  if (!has_unique_names(data)) {
    problem <- sprintf("`%s` must have columns with unique names.", arg)
    abort_input(problem, i = "Write `list(image = x, label = y)`, or pass a data frame.")
  }
  at <- rlang::set_names(paste0(arg, "$", names(data)), names(data))
  for (name in names(data)) {
    check_array(data[[name]], at[[name]])
  }
  check_same_rows(data, at)
  list(kind = "columns", value = as.list(data))
}
