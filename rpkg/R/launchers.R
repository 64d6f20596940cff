#' Run workers on hosts over ssh
#'
#' Value for the `sc` argument of [barrier_train()], [barrier_evaluate()], [barrier_predict()],
#' [barrier_apply()] and [train_mnist()]. The hosts need Python with TensorFlow, and an ssh server
#' that lets you log in without a password. tfdist, the model and the rows are sent to them. This
#' machine reaches them only over ssh; the workers connect to each other. When a call ends, for any
#' reason, it leaves nothing behind on the hosts. Only with `resources(fork_server = TRUE)`, a
#' process on each host waits for later calls; it ends with this session, or after ten minutes
#' without a call.
#'
#' @param hosts Host names, each with its number of slots (default 1), as one string or several:
#'   `"a:2,b:2"`, or `c("a:2", "b:2")`. `"user@a:2"` logs in as a different user; `"[fd00::1]:2"` is
#'   an IPv6 address. Workers fill the hosts in this order. All slots are used, unless `workers` is
#'   set.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param hostfile A file to use instead of `hosts`, with one host per line: `a slots=2` or `a:2`.
#' @param python Path to Python on the hosts. Python must be the same release as in this session
#'   (e.g. 3.11). `NULL` (default): the same path as in this session.
#' @param ssh_options Command-line options for ssh, e.g. `c("-p", "2222", "-i", "~/.ssh/cluster")`.
#'   `~/.ssh/config` is respected.
#' @param environment Environment variables for the workers, as a named vector. If you set `TMPDIR`,
#'   the workers store their rows there during the call.
#' @return An object for the `sc` argument. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' hosts("a:2,b:2")
#' \dontrun{
#' fit <- train_mnist(hosts("a:2,b:2"))
#' fit <- barrier_train(hosts(hostfile = "~/hosts"), model, data, workers = 4)
#' }
hosts <- new_maker("hosts", "launcher")

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
#' @inherit hosts return
#' @export
#' @examples
#' slurm(partition = "gpu", time = "2:00:00", nodes = 2, gpus = 1)
#' \dontrun{
#' fit <- barrier_train(slurm(nodes = 2), model, data, workers = 4)
#' }
slurm <- new_maker("slurm", "launcher")

#' Run workers on a Kubernetes cluster
#'
#' Value for the `sc` argument of [barrier_train()], [barrier_evaluate()], [barrier_predict()],
#' [barrier_apply()] and [train_mnist()]. Each call creates a Job with one pod per worker, shows
#' what the pods are waiting for, and deletes the Job at the end, even after an interrupt. This
#' session reaches the pods only through the cluster's API server.
#'
#' @param image Container image with TensorFlow and the same Python release as this session. If
#'   [resources()] has an `environment`, any image with Python 3.9 or later, `tar` and a C library
#'   that fits.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param namespace,context Namespace and context. `NULL` (default): those that `kubectl` uses.
#' @param cpus,memory,gpus Resources for each worker, such as `4` or `"500m"`, `"8Gi"` and `1`.
#' @param node_selector Labels of the nodes that may run workers, as a named vector.
#' @param tolerations Taints to tolerate, as a list of named lists.
#' @param secrets Names of Secrets whose keys become environment variables in the workers.
#' @param service_account Service account for the pods.
#' @param image_pull_secrets Names of Secrets that nodes use to pull the image.
#' @param time_limit Seconds after which Kubernetes terminates the Job. `NULL` (default): a week.
#' @param ttl Seconds after which Kubernetes deletes a finished Job that this session could not
#'   delete. `NULL` (default): 300.
#' @param python Path to Python in the image, or a command that starts it. `NULL` (default):
#'   `"python3"`.
#' @param labels Additional labels for the Job, its pods and the Service, as a named vector.
#' @param patience Seconds to wait until all pods are running. `NULL` (default): 600.
#' @inherit hosts return
#' @export
#' @examples
#' kubernetes("registry/tf:1", cpus = 4, memory = "8Gi")
#' \dontrun{
#' fit <- train_mnist(kubernetes("registry/tf:1", gpus = 1), workers = 4)
#' }
kubernetes <- new_maker("kubernetes", "launcher")
