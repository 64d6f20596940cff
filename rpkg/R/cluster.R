#' The TF_CONFIG of one process of a cluster
#'
#' TensorFlow's distribution strategies read the addresses of all processes and the role of their
#' own from the environment variable `TF_CONFIG`. `make_tf_config()` writes its value. Entries that
#' TensorFlow would answer by hanging, such as a duplicate address or a port of 0, are errors here.
#'
#' [barrier_train()] needs none of this: it places its workers itself.
#'
#' Python reads the environment when it starts, so `Sys.setenv(TF_CONFIG = )` must come before it.
#' `make_tf_config()` does not start Python in this session. Where Python runs already, set
#' the variable there, too: `reticulate::import("os")$environ$update(list(TF_CONFIG = config))`.
#'
#' @param workers Addresses of the workers, as `"host:port"`. With names, which are then their
#'   indices, the list may leave workers out.
#' @param index Which entry of its role this process is; the first is 0. `NULL` where the role has
#'   one entry only.
#' @param role `"worker"`, `"chief"`, `"ps"` or `"evaluator"`.
#' @param chief,evaluator Address of the chief and of the evaluator, if there are any.
#' @param ps Addresses of the parameter servers, if there are any.
#'
#' @return A string, the JSON text for `TF_CONFIG`.
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
  check_addresses(workers)
  index <- check_count(index, min = 0L, allow_null = TRUE)
  check_choice(role, c("worker", "chief", "ps", "evaluator"))
  check_addresses(chief, allow_null = TRUE)
  check_addresses(ps, allow_null = TRUE)
  check_addresses(evaluator, allow_null = TRUE)
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

check_addresses <- function(
  x,
  allow_null = FALSE,
  arg = caller_arg(x),
  call = caller_env()
) {
  if (is.list(x) && !is_python(x) && all(vapply(x, rlang::is_string, NA))) {
    x <- unlist(x)
  }
  is_absent <- is.null(x) && allow_null
  if (!is_absent && !(is.character(x) && length(x) > 0L && !anyNA(x))) {
    abort_expected(x, "addresses such as \"10.0.0.1:2222\"", allow_null, arg, call)
  }
}

# A list, because reticulate makes a bare string of a vector of one.
as_addresses <- function(x) if (!is.null(x)) as.list(x)

as_single <- function(x) if (length(x) == 1L) x[[1L]] else as_addresses(x)
