#' Run workers on the nodes of a Slurm cluster
#'
#' Value for the `sc` argument of [barrier_train()], [barrier_evaluate()], [barrier_predict()],
#' [barrier_apply()] and [train_mnist()], in a session on a login node. Each call submits a job with
#' one task per worker, shows its position in the queue and its progress, and returns the result. If
#' you interrupt the call or this session ends, the job is canceled. Without `workers`, a call
#' starts one worker per node, or as many per node as the `"ntasks-per-node"` option specifies. A
#' training run with `checkpoint` is saved when Slurm sends the termination signal. If the time
#' limit is at least ten minutes, Slurm sends it 60 seconds before the limit. The `signal` option,
#' for example `"TERM@300"`, changes this. Elastic training ([elastic()]) submits one job per
#' worker.
#'
#' @param partition Partition to submit the job to. For this and the following arguments, `NULL`
#'   (default) means the cluster's default, unless stated otherwise.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param time Time limit in minutes, or in Slurm's format: `"1:30:00"`, `"2-12:00"`.
#' @param nodes Number of nodes to spread the workers over. Each node has at least one worker.
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
slurm <- function(
  partition = NULL,
  ...,
  time = NULL,
  nodes = NULL,
  gpus = NULL,
  cpus = NULL,
  options = NULL,
  setup = NULL,
  folder = NULL,
  python = NULL,
  address = NULL,
  patience = NULL
) {
  check_dots_empty(...)
  if (!is.null(patience)) {
    check_positive(patience, finite = FALSE)
  }
  fields <- list(
    partition = check_line(partition),
    time = check_slurm_time(time),
    nodes = check_count(nodes, allow_null = TRUE),
    gpus = check_count(gpus, min = 0L, allow_null = TRUE),
    cpus = check_count(cpus, allow_null = TRUE),
    options = check_sbatch_options(options),
    setup = check_string(setup, allow_null = TRUE),
    folder = check_line(folder),
    python = check_line(python),
    address = check_string(address, allow_null = TRUE),
    patience = patience
  )
  new_launcher(fields, "slurm")
}

check_slurm_time <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.numeric(x)) {
    return(check_count(x, arg = arg, call = call))
  }
  minutes <- "[0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?"
  pattern <- sprintf("^(%s|[0-9]+-[0-9]+(:[0-9]{2}){0,2})$", minutes)
  expected <- "a whole number of minutes or text such as \"1:30:00\" or \"2-12:00\""
  check_pattern(x, pattern, expected, TRUE, arg, call)
}

# Options that define the job: other arguments or tfdist set them.
own_sbatch_options <- c(
  "array",
  "cpus-per-task",
  "error",
  "export",
  "gpus-per-task",
  "nodes",
  "ntasks",
  "output",
  "partition",
  "requeue",
  "time",
  "wrap"
)

check_sbatch_options <- function(x, arg = caller_arg(x), call = caller_env()) {
  check_named_list(x, "a named list of sbatch's long options", arg, call)
  for (name in names(x)) {
    value <- x[[name]]
    long <- gsub("_", "-", sub("^-+", "", name), fixed = TRUE)
    if (!grepl("^[a-z][a-z-]+$", long) || long %in% own_sbatch_options) {
      abort_input(
        c(
          sprintf("`%s` cannot have %s.", arg, encodeString(name, quote = "\"")),
          i = "Use the other arguments, or a long option of sbatch such as \"account\"."
        ),
        call = call
      )
    }
    if (!isTRUE(value) && !is_number(value)) {
      expected <- "one line of text, a number, or `TRUE` for an option without a value"
      check_pattern(value, "^[^[:cntrl:]]*$", expected, arg = paste0(arg, "$", name), call = call)
    }
  }
  invisible(x)
}
