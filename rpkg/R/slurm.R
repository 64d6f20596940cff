#' Run workers on the nodes of a Slurm cluster
#'
#' Value for the `sc` argument of [barrier_train()], [barrier_evaluate()], [barrier_predict()],
#' [barrier_apply()] and [train_mnist()], in a session on a login node. Each call submits a job with
#' one task per worker, shows its position in the queue and its progress, and returns the result. If
#' you interrupt the call or this session ends, the job is canceled. Without `workers`, a call
#' starts one worker per node, or as many per node as the `"ntasks-per-node"` option specifies. A
#' training run with checkpoints (see [recovery()]) is saved when Slurm sends the termination
#' signal. If the time limit is at least ten minutes, Slurm sends it 60 seconds before the limit.
#' The `signal` option, for example `"TERM@300"`, changes this. Elastic training ([elastic()])
#' submits one job per worker. With `nodes`, it submits one job, in which srun on this machine
#' starts a step per worker.
#'
#' @param partition Partition to submit the job to. For this and the following arguments, `NULL`
#'   (default) means the cluster's default, unless stated otherwise.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param time Time limit in minutes, or in Slurm's format: `"1:30:00"`, `"2-12:00"`.
#' @param nodes Number of nodes to spread the workers over. Each node has at least one worker,
#'   except in elastic training, where a node may be a spare for lost workers.
#' @param gpus,cpus GPUs and cores for each worker.
#' @param options Additional sbatch options by their long names, such as
#'   `list(account = "physics", "mem-per-cpu" = "4G", exclusive = TRUE)`.
#' @param setup Shell commands to run before the workers start, such as `"module load cuda"`.
#' @param folder Folder in which a temporary folder is created for the job and removed at the end.
#'   It must be on a file system that the nodes share with this machine. `NULL` (default):
#'   `~/.tfdist`.
#' @param python Path to Python on the nodes. TensorFlow must be installed for this Python. `NULL`
#'   (default): the same path as in this session.
#' @param address An address of this machine that the nodes can reach. `NULL` (default): the address
#'   that this machine uses to connect to the nodes.
#' @param patience Seconds that the job may wait in the queue. `NULL` (default): no limit.
#'
#' @return An object for the `sc` argument. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' slurm(partition = "gpu", time = "2:00:00", nodes = 2, gpus = 1)
#' \dontrun{
#' fit <- barrier_train(slurm(nodes = 2), model, data, workers = 4)
#' }
slurm <- new_maker("slurm", "launcher")
