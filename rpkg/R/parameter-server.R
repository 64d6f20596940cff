#' Train asynchronously on parameter servers
#'
#' Value for the `exchange` argument of [barrier_train()]: training with TensorFlow's
#' `ParameterServerStrategy`. The weights are stored on parameter servers, and each worker takes
#' steps on batches of its own rows without waiting for the others. The result is *not* the same as
#' that of one process, and differs from run to run. An epoch has as many steps as there are batches
#' in all rows; a faster worker takes more of these steps. Training continues without a lost worker,
#' except on Spark and in sessions that join. The `workers` of [barrier_train()] take the steps. The
#' parameter servers are additional processes, as is a chief, which schedules the steps and holds
#' the final model.
#'
#' @return An object for [barrier_train()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' parameter_server(servers = 2)
#' \dontrun{
#' fit <- barrier_train(sc, model, data, workers = 4, exchange = parameter_server(servers = 2))
#' }
parameter_server <- new_maker("parameter_server")
