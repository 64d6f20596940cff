#' Resources of each worker
#'
#' Value for the `resources` argument of [barrier_train()] and the other functions that start
#' workers. It has the same meaning with every launcher. A launcher that cannot provide the
#' resources raises an error before training starts. With Spark 4 on a cluster, the tasks that run
#' the workers get these cores and GPUs; other tasks of the session keep theirs.
#'
#' @param cpus Number of TensorFlow threads in each worker. `NULL` (default): the machine's cores
#'   are divided among its workers.
#' @param memory Memory limit for a worker and all processes that it starts: a number of bytes, or
#'   text such as `"4GB"`, `"512MiB"` or `"4g"` (`"4GiB"`, as in Spark and Slurm). A worker that
#'   exceeds the limit is killed, and an error reports this. `NULL` (default): no limit.
#' @param gpus Number of GPUs that each worker gets for its exclusive use; 0 hides all GPUs. `NULL`
#'   (default): the machine's GPUs are assigned to its workers in turn.
#' @param environment Python environment of the workers, with Spark, [hosts()], [slurm()] and
#'   [kubernetes()]: their hosts need nothing installed. `"this"`: the environment of this session.
#'   Or the path of an environment's folder, or of a file that [pack_environment()], venv-pack or
#'   conda-pack wrote. It is sent to each host once, and unpacked there. `NULL` (default): what the
#'   hosts have.
#' @param fork_server Whether a process that has imported TensorFlow waits for later calls on each
#'   host, so that their workers start at once. It takes 0.5 GB of memory, and ends when it has not
#'   been used for ten minutes, or with the session (on Spark: with its executor). `NULL` (default):
#'   on this machine, and not elsewhere. `TRUE` is possible with Spark and [hosts()].
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
resources <- function(
  cpus = NULL,
  memory = NULL,
  gpus = NULL,
  environment = NULL,
  fork_server = NULL
) {
  fields <- list(
    cpus = cpus,
    memory = memory,
    gpus = gpus,
    environment = environment,
    fork_server = fork_server
  )
  new_options(fields, "tfdist_resources")
}
