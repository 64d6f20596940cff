#' Create the TF_CONFIG value for one process
#'
#' TensorFlow's distribution strategies read the addresses of all processes and their own role from
#' the environment variable `TF_CONFIG`. `make_tf_config()` returns its value. Entries that would
#' make TensorFlow hang, such as a duplicate address or a port of 0, raise an error.
#'
#' [barrier_train()] does not need `TF_CONFIG`, because it assigns its workers' addresses itself.
#'
#' Python reads the environment when it starts, so call `Sys.setenv(TF_CONFIG = )` first.
#' `make_tf_config()` does not start Python in this session. If Python is already running, set the
#' variable in Python, too: `reticulate::import("os")$environ$update(list(TF_CONFIG = config))`.
#'
#' @param workers Addresses of the workers, as `"host:port"`. If you name the addresses, each name
#'   is the index of that worker, and you can leave out some workers.
#' @param index Index of this process within its role, from 0. `NULL` if the role has only one
#'   process.
#' @param role `"worker"`, `"chief"`, `"ps"` or `"evaluator"`.
#' @param chief,evaluator Addresses of the chief and the evaluator, if any.
#' @param ps Addresses of the parameter servers, if any.
#' @return A string: the value of `TF_CONFIG`, in JSON.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' make_tf_config(c("10.0.0.1:2222", "10.0.0.2:2222"), index = 0)
make_tf_config <- function(
  workers,
  index = NULL,
  role = "worker",
  chief = NULL,
  ps = NULL,
  evaluator = NULL
) {
  check_given()
  index <- check_count(index, min = 0L, allow_null = TRUE)
  check_one_of(role, c("worker", "chief", "ps", "evaluator"))
  # reticulate turns a vector of length one into a string.
  as_single <- function(x) if (length(x) == 1L) x[[1L]] else as_list_or_null(x)
  others <- list(chief = as_single(chief), evaluator = as_single(evaluator))
  named <- c(list(role = role, ps = as_list_or_null(ps)), others)
  arguments <- list(as_list_or_null(workers), index)
  if (!reticulate::py_available()) {
    return(call_python_apart("make_tf_config", arguments, named))
  }
  call_python(pybackend()$make_tf_config, !!!arguments, !!!named)
}

#' Train together with other sessions that you start yourself
#'
#' Call `join_workers()` in a session on every machine, with the same addresses in the same order.
#' Then make the same calls in all of them, with `NULL` instead of a connection:
#' `barrier_train(NULL, ...)`, [train_mnist()] and similar functions. The sessions connect to the
#' first address, and you can start them in any order. Each trains on its shard of the rows, and
#' each gets the result. Files, such as checkpoints, are written only by the first session. Some of
#' the sessions may be Python sessions, where the function is `pybackend.join()`.
#'
#' `join_workers()` sets the environment variable `TF_CONFIG`, as described in [make_tf_config()].
#' You do not need to call it if the variable is already set, or if `mpirun` or Slurm's `srun`
#' started the sessions.
#'
#' All sessions must pass the same model, arguments and rows. tfdist distributes the rows. Any
#' difference raises an error in all sessions. If each machine has its own rows, pass a function
#' that returns a `tf.data.Dataset`.
#'
#' @param addresses Addresses of all sessions, as `"host:port"`. Each session listens on its own
#'   address.
#' @param index Index of this session's address, from 0.
#' @param secret_file File with the shared secret that the sessions use to authenticate each other.
#'   The command `tfdist secret` creates it; copy it to all machines. `NULL` (default): the
#'   environment variables `TFDIST_SECRET` or `TFDIST_SECRET_FILE`, or `~/.config/tfdist/secret`.
#'   Sessions on one machine (`"127.0.0.1:..."`) do not need it.
#' @return `TF_CONFIG`, invisibly.
#' @export
#' @examples
#' \dontrun{
#' # On the machine a; on b with index = 1.
#' join_workers(c("a:2222", "b:2222"), index = 0)
#' fit <- train_mnist(NULL)
#' }
join_workers <- function(addresses, index, secret_file = NULL) {
  check_given()
  check_strings(unlist(addresses), arg = "addresses")
  index <- check_count(index, min = 0L)
  check_string(secret_file, allow_null = TRUE)
  if (!is.null(secret_file) && !file.exists(secret_file)) {
    problem <- sprintf("`secret_file` does not exist: %s.", secret_file)
    abort_input(problem, i = "The command `tfdist secret` creates one.")
  }
  config <- make_tf_config(addresses, index)
  Sys.setenv(TF_CONFIG = config)
  if (!is.null(secret_file)) {
    Sys.setenv(TFDIST_SECRET_FILE = normalizePath(secret_file, mustWork = FALSE))
  }
  invisible(config)
}

# Environment variables that calls read: the rank of this session, the shared secret, and whether a
# fork server is used.
place_variables <- c("TF_CONFIG", "TFDIST_SECRET", "TFDIST_SECRET_FILE", "TFDIST_FORK_SERVER")

# Python read the environment at its start: pass on what R has changed since then.
open_place <- function(sc) {
  set <- Sys.getenv(place_variables, unset = NA)
  pybackend()
  environ <- reticulate::import("os")$environ
  environ$update(as.list(set[!is.na(set)]))
  for (name in names(set)[is.na(set)]) {
    environ$pop(name, NULL)
  }
  fork_server <- getOption("tfdist.fork_server")
  if (!is.null(fork_server)) {
    check_flag(fork_server, arg = "options(tfdist.fork_server = )")
    environ$update(list(TFDIST_FORK_SERVER = if (fork_server) "1" else "0"))
  }
  sc
}
