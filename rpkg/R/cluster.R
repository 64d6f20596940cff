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
#'
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
  named <- list(
    role = role,
    chief = as_single(chief),
    ps = as_addresses(ps),
    evaluator = as_single(evaluator)
  )
  arguments <- list(as_addresses(workers), index)
  if (!reticulate::py_available()) {
    return(call_python_apart("make_tf_config", arguments, named))
  }
  backend <- pybackend()
  do.call(call_python, c(list(backend$make_tf_config), arguments, named))
}

# A list, because reticulate turns a vector of length one into a string.
as_addresses <- function(x) if (!is.null(x)) as.list(x)

as_single <- function(x) if (length(x) == 1L) x[[1L]] else as_addresses(x)
