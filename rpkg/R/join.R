#' Train together with other R and Python sessions, each started by hand
#'
#' Call `join_workers()` in a session on every machine, with the same addresses in the same order,
#' and then make the same calls in all of them, with `NULL` in place of a connection:
#' `barrier_train(NULL, ...)`, [train_mnist()] and their like. The sessions find each other at the
#' first address, in any order of start; each trains on its share of the rows, and each gets the
#' result. Files, such as checkpoints, are written by the first one alone. Some of them may be
#' Python, where the function is called `pybackend.join()`.
#'
#' It sets the environment variable `TF_CONFIG`, as [make_tf_config()] describes it. If that is set
#' already, or if `mpirun` or Slurm's `srun` has started the sessions, `join_workers()` is not
#' needed.
#'
#' All sessions must pass the same model, arguments and rows, of which each takes its share; what
#' differs is an error in all of them. Rows that only one machine has come from a function that
#' returns a `tf.data.Dataset`.
#'
#' @param addresses Addresses of all sessions, as `"host:port"`. Each session listens on its own.
#' @param index Number of this session among them, from 0.
#' @param secret_file File with the secret by which the sessions recognize each other: the command
#'   `tfdist secret` makes one, which has to be copied to all machines. `NULL`: what the environment
#'   variables `TFDIST_SECRET` or `TFDIST_SECRET_FILE` say, or `~/.config/tfdist/secret`. Sessions
#'   that are all on one machine (`"127.0.0.1:..."`) need none.
#'
#' @return `TF_CONFIG`, invisibly.
#' @export
#' @examples
#' \dontrun{
#' # On the machine a; on b with index = 1.
#' join_workers(c("a:2222", "b:2222"), index = 0)
#' fit <- train_mnist(NULL)
#' }
join_workers <- function(addresses, index, secret_file = NULL) {
  check_addresses(addresses)
  index <- check_count(index, min = 0L)
  check_string(secret_file, allow_null = TRUE)
  if (!is.null(secret_file) && !file.exists(secret_file)) {
    abort_input(
      c(
        sprintf("`secret_file` does not exist: %s.", secret_file),
        i = "The command `tfdist secret` makes one."
      )
    )
  }
  config <- make_tf_config(addresses, index)
  Sys.setenv(TF_CONFIG = config)
  if (!is.null(secret_file)) {
    Sys.setenv(TFDIST_SECRET_FILE = normalizePath(secret_file, mustWork = FALSE))
  }
  invisible(config)
}

# Variables that say which of several sessions this one is, and prove it.
place_variables <- c("TF_CONFIG", "TFDIST_SECRET", "TFDIST_SECRET_FILE")

# Python has read the environment when it started: what R has set since is new to it.
open_place <- function(sc, call = caller_env()) {
  set <- Sys.getenv(place_variables, unset = NA)
  pybackend(call)
  environ <- reticulate::import("os")$environ
  environ$update(as.list(set[!is.na(set)]))
  for (name in names(set)[is.na(set)]) {
    environ$pop(name, NULL)
  }
  sc
}
