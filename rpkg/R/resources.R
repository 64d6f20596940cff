#' Resources of each worker
#'
#' Value for the `resources` argument of [barrier_train()] and the other functions that start
#' workers. It has the same meaning with every launcher. A launcher that cannot provide the
#' resources raises an error before training starts. With Spark 4 on a cluster, the tasks that run
#' the workers get these cores and GPUs; other tasks of the session keep theirs.
#'
#' @return An object for [barrier_train()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' resources(cpus = 2, memory = "4GB")
#' \dontrun{
#' barrier_train(sc, model, data, workers = 8, resources = resources(cpus = 4, gpus = 1))
#' train_mnist(sc, workers = 3, resources = resources(environment = "this"))
#' }
resources <- new_maker("resources")
