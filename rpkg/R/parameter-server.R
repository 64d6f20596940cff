#' Train asynchronously on parameter servers
#'
#' Value for the `strategy` argument of [barrier_train()]: training with TensorFlow's
#' `ParameterServerStrategy`. The weights are on parameter servers, and each worker takes steps on
#' batches of its own rows without waiting for others. The result is *not* that of one process, and
#' differs from run to run. An epoch has as many steps as all rows make batches; a faster worker
#' takes more of them. Training continues without a lost worker, except on Spark and in sessions
#' that join. The `workers` of [barrier_train()] take the steps; the servers, and a chief that
#' schedules the steps and has the model at the end, are additional processes.
#'
#' @param servers Number of parameter servers, which divide the weights.
#'
#' @return An object for [barrier_train()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' parameter_server(servers = 2)
#' \dontrun{
#' fit <- barrier_train(sc, model, data, workers = 4, strategy = parameter_server(servers = 2))
#' }
parameter_server <- function(servers = 1) {
  new_options(list(servers = check_count(servers)), "tfdist_parameter_server")
}

# The name of a strategy of TensorFlow. If it is not supported, Python's error says what to use.
check_strategy <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (!is.null(x) && !rlang::is_string(x) && !inherits(x, "tfdist_parameter_server")) {
    abort_expected(x, "\"parameter_server\" or made by `parameter_server()`", TRUE, arg, call)
  }
  invisible(x)
}
