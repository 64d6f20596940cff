#' Run an R function once per worker
#'
#' Runs `f(ctx, ...)` in `workers` R processes at the same time, with `TF_CONFIG` set and its ports
#' reserved, so that TensorFlow's own distribution strategies just work, and returns what each has
#' returned. [barrier_train()] needs none of this: it is for training loops of your own.
#'
#' On a sparklyr connection the function runs under `sparklyr::spark_apply(barrier = TRUE)`: the
#' executors need R with the package reticulate, and Python with what `f` uses. On all other routes
#' it runs by rpy2 in a Python process, so the workers' machines need R, reticulate and rpy2. tfdist
#' itself is needed on none.
#'
#' @inheritParams barrier_train
#' @param sc Where the workers run, as in [barrier_train()]; what their machines need stands above.
#' @param f A function whose first argument is the worker's place: a list of `rank` (the first is
#'   0), `world_size`, `addresses` (`"host:port"` of all workers) and `tf_config` (the text of
#'   `TF_CONFIG`). Variables that it uses, of its own environment and of the workspace, and all
#'   functions of the workspace travel along, and packages that it uses and that are attached here
#'   are attached there. What it names as text only, as in `get("x")`, or by an R6 object of the
#'   workspace, is not seen. Python objects do not travel: import and make them inside.
#' @param ... Further arguments for `f`.
#' @param packages Names of packages to attach in the workers besides.
#' @param verbose 2 shows what the workers print, 0 and 1 do not.
#'
#' @return A list with a value per worker, by rank: vectors, factors, lists and data frames with
#'   their attributes. Return a Keras model as
#'   `reticulate::import("pybackend")$model_to_base64(model)`.
#'
#' @section Errors:
#' An error in `f` ends all workers and becomes a `tfdist_error_worker_failed` with the message,
#' the `rank`, the `host`, and R's call stack as `traceback`. See [tfdist_error].
#'
#' @export
#' @examples
#' \dontrun{
#' sc <- sparklyr::spark_connect(master = "yarn")
#' barrier_apply(sc, function(ctx) c(ctx$rank, Sys.getpid()), workers = 3)
#' }
barrier_apply <- function(sc, f, workers = 3L, ..., packages = NULL, verbose = 2) {
  route <- check_sc(sc)
  check_applied(f)
  workers <- check_count(workers)
  check_strings(packages, allow_null = TRUE)
  verbose <- check_verbose(verbose)

  call <- rlang::current_env()
  applied <- as_r_function(f, packages, pack_value, extra = list(...), arg = "f", call = call)
  backend <- pybackend()
  values <- call_python(
    backend$barrier_run,
    open_r_workers(route),
    applied,
    workers = workers,
    verbose = verbose
  )
  lapply(values, unpack_value)
}

check_applied <- function(f, arg = caller_arg(f), call = caller_env()) {
  if (!is.function(f) || is_python(f) || is.primitive(f)) {
    abort_expected(f, "an R function of the worker's place, `function(ctx)`", FALSE, arg, call)
  }
  if (length(formals(f)) == 0L) {
    abort_input(
      c(
        sprintf("`%s` must take an argument, the worker's place.", arg),
        i = "Write `function(ctx)`; `ctx$rank` is the worker's number."
      ),
      call = call
    )
  }
}
