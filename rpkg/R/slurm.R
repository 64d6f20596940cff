#' Train on the nodes of a Slurm cluster
#'
#' For the argument `sc` of [barrier_train()], [barrier_evaluate()], [barrier_predict()],
#' [barrier_apply()] and [train_mnist()], in a session on a login node. Each call submits a job of
#' one task per worker, shows its place in the queue and its progress, and returns the result. An
#' interrupt cancels the job, and so does the end of this session. A call that does not say how many
#' `workers` has one per node, or as many as the option `"ntasks-per-node"` says. A training with
#' `checkpoint` is kept when Slurm tells the job to end, which it does 60 seconds before its time is
#' over (limits of ten minutes and more), or as the option `signal` says: `"TERM@300"`. An elastic
#' training (`min_workers`) has a job for each worker.
#'
#' @param partition Where the job runs; `NULL`: the cluster's default, as for all that follows.
#' @param ... Must be empty: the arguments that follow are given by name.
#' @param time Limit in minutes, or as Slurm has it: `"1:30:00"`, `"2-12:00"`.
#' @param nodes Nodes among which the workers are spread; each has at least one.
#' @param gpus,cpus GPUs and cores of each worker.
#' @param options Further options of sbatch by their long names, as in
#'   `list(account = "physics", "mem-per-cpu" = "4G", exclusive = TRUE)`.
#' @param setup Shell commands before the workers start, such as `"module load cuda"`.
#' @param folder Where the job's own folder is made, and removed in the end: on a file system that
#'   nodes share with this machine; `NULL`: `~/.tfdist`.
#' @param python The Python of the nodes, which needs TensorFlow; `NULL`: this session's path.
#' @param address An address of this machine that nodes reach; `NULL`: the one on the route to them.
#' @param patience Seconds that the job may wait in the queue; `NULL`: no limit.
#'
#' @return An object for the argument `sc`. Bad arguments are an error of class
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

# Those that decide what the job is: other arguments say it, or tfdist does.
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
