#' @keywords internal
#' @importFrom rlang %||% .data abort caller_arg caller_env
"_PACKAGE"

# State of this session: the Python module, the attached Spark applications, the running
# TensorBoards, and what Python's callbacks in R left behind.
the <- new.env(parent = emptyenv())
the$pybackend <- NULL
the$applications <- list()
the$boards <- list()
the$observer_error <- NULL
the$warnings <- list()

.onLoad <- function(libname, pkgname) {
  # reticulate and its imports take seconds to load, and are not needed before Python.
  when_loaded("reticulate", declare_python)
  when_loaded("parsnip", register_engine)
}

when_loaded <- function(package, act) {
  if (isNamespaceLoaded(package)) {
    act()
  } else {
    setHook(packageEvent(package, "onLoad"), \(...) act())
  }
}

declare_python <- function() {
  # If Python is already running, import() would not wait, and a missing module would make
  # library(tfdist) fail.
  if (reticulate::py_available()) {
    quiet_imports()
  } else {
    reticulate::import("pybackend", delay_load = list(environment = "r-tfdist", priority = 5))
    setHook("reticulate.onPyInit", quiet_imports)
  }
}

#' Options for tfdist
#'
#' Set them with [options()], for a session or in `.Rprofile`. An invalid value raises an error in
#' the call that uses it, and the error names the option.
#'
#' * `tfdist.workers`: the default for `workers` in [barrier_train()], [train_mnist()],
#'   [barrier_evaluate()], [barrier_predict()], [barrier_apply()], [ml_keras()] and the
#'   [parsnip][parsnip_engine] engine. Not used if the `roles` argument of [barrier_apply()] sets
#'   the number of workers. `NULL` (default): each function's own default.
#' * `tfdist.verbose`: the default for `verbose` in the same functions: 0 shows nothing, 1 shows
#'   progress, and 2 also shows what the workers print. `NULL` (default): each function's own
#'   default.
#' * `tfdist.fork_server`: whether calls on this machine import TensorFlow once, in a process in the
#'   background from which all workers are forked, so that later calls start at once. It takes about
#'   0.4 GB of memory, and exits with the session or after ten minutes without a call. `NULL`
#'   (default): `TRUE` on Linux without GPUs.
#' * `tfdist.job_pane`: whether a training also appears in RStudio's Background Jobs pane, if the
#'   rstudioapi package is installed. The default is `TRUE`.
#' * `tfdist.max_function_mb`: maximum size in megabytes of an R function that is sent to the
#'   workers, including the variables that it uses. The default is 256.
#'
#' In an interactive console that can redraw its last line, where `cli::is_dynamic_tty()` is `TRUE`,
#' progress is shown as a bar. cli's own options, such as `cli.progress_bar_style`, set its style.
#' Elsewhere, as in documents and scripts, it is shown as one line per epoch.
#'
#' @name tfdist_options
#' @examples
#' old <- options(tfdist.workers = 4, tfdist.verbose = 0)
#' getOption("tfdist.workers")
#' options(old)
NULL

# Name of an argument in errors: its option, if the value comes from there.
name_argument <- function(name, frame) {
  option <- paste0("tfdist.", name)
  is_option <- name %in% c("workers", "verbose") && !is.null(getOption(option))
  # `missing` is about the variables of the function that calls it.
  is_left_out <- is_option && eval(call("missing", as.name(name)), frame)
  if (is_left_out) sprintf("options(%s = )", option) else name
}

# A larger function is a mistake: rows are passed as `data`, or the workers read them.
max_closure_bytes <- function() {
  megabytes <- getOption("tfdist.max_function_mb", 256)
  check_positive(megabytes, finite = FALSE, arg = "options(tfdist.max_function_mb = )")
  megabytes * 2^20
}
