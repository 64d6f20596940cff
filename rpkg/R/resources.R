#' What each worker may use of its machine
#'
#' For the argument `resources` of [barrier_train()] and the other calls that start workers. It
#' means the same wherever they run; what cannot be given is an error before the training starts.
#'
#' @param cpus Number of TensorFlow's threads in each worker. `NULL`: workers that share a machine
#'   divide its cores.
#' @param memory Most memory of a worker and of all that it starts: a number of bytes, or text such
#'   as `"4GB"`, `"512MiB"` or `"4g"` (`"4GiB"`, as in Spark and Slurm). A worker that takes more is
#'   ended, with an error that says so. `NULL`: no limit.
#' @param gpus Number of GPUs of each worker, which no other worker gets; 0 hides all of them.
#'   `NULL`: workers that share a machine get its GPUs in turn.
#'
#' @return An object for [barrier_train()]. Bad arguments are an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' resources(cpus = 2, memory = "4GB")
#' \dontrun{
#' barrier_train(sc, model, data, workers = 8, resources = resources(cpus = 4, gpus = 1))
#' }
resources <- function(cpus = NULL, memory = NULL, gpus = NULL) {
  fields <- list(
    cpus = check_count(cpus, allow_null = TRUE),
    memory = check_memory(memory),
    gpus = check_count(gpus, min = 0L, allow_null = TRUE)
  )
  new_options(fields, "tfdist_resources")
}

check_memory <- function(x, arg = caller_arg(x), call = caller_env()) {
  text <- "^\\s*[0-9]+([.][0-9]+)?\\s*[kmgtKMGT]?([iI]?[bB])?\\s*$"
  is_text <- rlang::is_string(x) && grepl(text, x)
  if (!is.null(x) && !is_text && !(is_number(x) && is.finite(x) && x >= 2^20)) {
    expected <- "text such as \"4GB\", \"512MiB\" or \"4g\""
    abort_expected(x, expected, TRUE, arg, call)
  }
  invisible(x)
}
