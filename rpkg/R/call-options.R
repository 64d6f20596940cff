# fmt: skip file
# Written by scripts/r_options.py from the arguments in Python; run `make r-document`.

#' Options of calls that train or use a model
#'
#' They mean the same in all calls that have them.
#'
#' @param workers Number of workers. `NULL` (default): 2, or the number of processes that join.
#'   [elastic()]: training continues without lost workers, and others may join. With a number,
#'   losing a worker ends training.
#' @param weight Column with the weight of each row in the loss.
#' @param data_options [data_options()]: dtypes and shapes of columns, categories, and where workers
#'   store their rows.
#' @param resources [resources()]: cores, memory and GPUs of each worker. `NULL` (default): workers
#'   on the same machine divide its cores and GPUs.
#' @param model_options [model_options()]: custom classes of the model, and where the trained model
#'   is written.
#' @param timeout Seconds that workers wait for each other to start, as in [recovery()].
#' @param epochs Passes over the data. Each pass uses each row exactly once.
#' @param steps_per_epoch Steps per epoch. The next epoch continues with the rows that follow, and
#'   after the last ones with the first, also within an epoch: Keras would end that epoch early.
#'   `NULL` (default): as many as it takes to use all rows.
#' @param validation_data As `data`. All workers evaluate it together after each epoch.
#' @param validation_split Fraction of the rows to use for validation instead of `validation_data`.
#'   They are the last rows of the arrays or the data frame (not a Spark one), before shuffling.
#' @param validation_freq Number of epochs between validations, or a list of the epochs to validate
#'   after, counted from 1.
#' @param shuffle `TRUE` (default) or `"shard"`: each worker shuffles its own rows in each epoch.
#'   `"global"` (arrays and files): all rows are shuffled and redistributed in each epoch, so every
#'   worker stores all rows. `FALSE`: rows keep their order.
#' @param exchange [exchange()] (default): gradients are averaged in every step. [local_steps()]:
#'   for slow networks; the result no longer equals that of one process. [parameter_server()]:
#'   asynchronous training, with a result that differs from that of one process. Then `workers` is
#'   the number of workers that take steps; a chief and the servers are additional processes.
#' @param recovery [recovery()], or only the folder of its checkpoints: saves the state of training,
#'   so that a call with `recovery(..., resume = TRUE)` can resume, and restarts the workers after
#'   one was lost.
#' @param initial_epoch Number of epochs that were trained before. Training starts with epoch
#'   `initial_epoch + 1` and ends with epoch `epochs`, as in Keras's `fit`.
#' @name call_options
#' @keywords internal
NULL

#' @rdname data_options
#' @name data_options
#' @param in_memory `TRUE`: workers hold their rows in memory if they fit into half of the free
#'   memory. Otherwise the rows stay on disk, and a note reports that. `FALSE` (default): all rows
#'   are on the worker's disk, and memory use does not grow with them. The order of rows is the same
#'   either way.
NULL

#' @rdname elastic
#' @name elastic
#' @param workers Number of workers at the start. `NULL` (default): the same as without [elastic()],
#'   but at least `min` and at most `max`.
#' @param min The training continues without workers that fail or are preempted, as long as this
#'   many are left.
#' @param max Workers are started until there are this many, as soon as there are slots for them. If
#'   it is larger than `workers`, spare workers join after the first epochs. `NULL` (default): lost
#'   workers are not replaced.
NULL

#' @rdname exchange
#' @name exchange
#' @param transport `"tcp"` (default), or `"tf"` for TensorFlow's collectives (NCCL between GPUs).
#'   TensorFlow's servers accept every connection: use `"tf"` only on networks that you trust.
#' @param compression `"fp16"` or `"bf16"` halves the number of bytes sent. Rounding errors are
#'   added to later steps (error feedback), but the result no longer equals that of one process.
#'   `NULL` (default): exact. Needs `transport = "tcp"`.
#' @param bucket_mb Megabytes of gradients per message, sent while the backward pass is still
#'   running. `Inf`: all gradients at once, after the backward pass. `NULL` (default): 25, with two
#'   exceptions, unless there is `compression`. Two workers on two hosts send 1 to 64, as many as
#'   their connection takes in about 20 ms. If all workers are on one host that has no more cores
#'   than workers, they send all at once.
#' @param loss_over Rows over which the loss is computed. `"rows"` (default): each worker computes
#'   the loss of its own rows, which must be a mean over rows. `"global batch"`: in each step the
#'   workers exchange their outputs, labels and weights, and compute the loss of all rows. The loss
#'   may then compare or sum the rows of a batch (contrastive, ranking, correlation, soft F1, sums),
#'   and masks may reach several losses.
#' @param encrypt `TRUE` encrypts and authenticates the data that the workers exchange (TLS 1.3).
#'   `NULL` (default): only between machines. `FALSE`: never, for fast networks that you trust.
#' @param audit `TRUE` (default) repeats some steps in one process, on the rows of all workers, and
#'   compares the results: the first step of the first epoch and its last one, if that has another
#'   number of rows, the first step of the second epoch, and as many steps as fit into 2 % of the
#'   time. The numbers of the rows of all steps are checked, too. A difference that rounding does
#'   not explain raises an error; with `"warn"`, it produces a note. Only the audit finds losses
#'   that are not a mean over rows. With `compression`, the repeated step is exchanged uncompressed.
#'   `FALSE`: no audit.
#' @param shard_optimizer `TRUE`: each worker has the optimizer's state for only its part of the
#'   weights, updates that part, and gets the new values of the others (ZeRO, stage 1). With N
#'   workers and P bytes of weights, Adam's state takes 2 P / N bytes on each worker instead of 2 P,
#'   if no single variable is larger than that. The result is the same up to rounding. No more bytes
#'   are sent, except that tables with sparse gradients are sent whole, and that hosts with several
#'   workers do not first sum in memory. While rank 0 writes the model or a checkpoint, it holds the
#'   state of all workers. `FALSE` (default): each worker has all state. Needs `transport = "tcp"`
#'   without `compression`.
NULL

#' @rdname exchange
#' @name local_steps
#' @param steps Number of steps between averages, at least 2.
#' @param learning_rate,momentum Learning rate and momentum with which the average change of the
#'   weights is applied. 0.7 and 0.9 correspond to DiLoCo.
NULL

#' @rdname model_options
#' @name model_options
#' @param uri Only in training: where rank 0 writes the trained model, instead of sending it through
#'   the driver: a path that all hosts share, or a URI for fsspec, that ends in .h5 or .keras.
#'   Needed for models of a gigabyte or more. `NULL` (default): the model returns to this session.
#' @param safe_mode `FALSE`: a model built by a function may be returned as a complete file, even if
#'   it contains Python code (a `Lambda` layer). `TRUE` (default): only its weights are returned,
#'   and the function rebuilds the model here. A model that you pass needs no such permission.
NULL

#' @rdname parameter_server
#' @name parameter_server
#' @param servers Number of parameter servers, which divide the weights.
NULL

#' @rdname recovery
#' @name recovery
#' @param uri A folder for this training run only: a path that the machines of all workers share, or
#'   a URI for fsspec. On one machine it may be any path. `NULL` (default): nothing is saved.
#' @param every Time between checkpoints: `"epoch"` (default), a number of steps, or a time such as
#'   `"600s"`, `"10min"` or `"1h"`. The final state is always saved.
#' @param keep Maximum number of checkpoints. Training stops with an error if this many in a row,
#'   but at least two, could not be written.
#' @param resume `TRUE`: resume from the newest intact checkpoint, or start from the beginning if
#'   there is none. `FALSE` (default): the folder must not contain checkpoints.
#' @param restarts Number of times that the workers are restarted after one was lost, killed or
#'   stopped, or ran out of memory: from the newest checkpoint, or without `uri` from the beginning.
#'   With `uri`, they are also restarted after a preemption (SIGTERM, an eviction) and after the
#'   time limit of a job. Errors that the model, the data or a callback raises are not retried.
#' @param timeout Seconds that workers wait for each other to start. After the same time, a worker
#'   counts as lost if it was stopped or its machine does not answer. For a worker that is merely
#'   slow, the others wait up to six hours, and a note names it once a minute.
#' @param pause Seconds before a restart if the workers could not be started, as when a host boots.
#'   The pause grows by this much with each restart.
NULL

#' @rdname resources
#' @name resources
#' @param cpus Number of TensorFlow threads in each worker. `NULL` (default): workers on the same
#'   machine divide its cores.
#' @param memory Memory limit for a worker and all processes that it starts: bytes, or text such as
#'   `"4GB"`, `"512MiB"` or `"4g"` (`"4GiB"`, as in Spark and Slurm). A worker above the limit is
#'   killed. `NULL` (default): no limit.
#' @param gpus Number of GPUs for each worker's exclusive use; 0 hides all of them. `NULL`
#'   (default): workers on the same machine get its GPUs in turn.
#' @param environment Python environment of the workers, with Spark, [hosts()], [slurm()] and
#'   [kubernetes()]: nothing needs to be installed on their hosts. `"this"`: the environment of this
#'   session. Or the path of an environment's folder, or of a file that [pack_environment()],
#'   venv-pack or conda-pack wrote. It is sent to each host once, and unpacked there. `NULL`
#'   (default): what the hosts have.
#' @param fork_server Whether a process that has imported TensorFlow waits for later calls on each
#'   host, so that their workers start at once. It takes 0.4 GB of memory, and ends when it has not
#'   been used for ten minutes, or with the session (on Spark: with its executor). `NULL` (default):
#'   on this machine, and not elsewhere. `TRUE` is possible with Spark and [hosts()].
NULL

# Options and their defaults.
option_defaults <- alist(
  batch_size = 32, callbacks = NULL, class_weight = NULL, data_options = NULL, epochs = 1,
  exchange = NULL, features = NULL, initial_epoch = 0, label = "label", levels = NULL,
  model_options = NULL, on_missing = "null", recovery = NULL, resources = NULL, seed = NULL,
  shuffle = TRUE, steps_per_epoch = NULL, timeout = 300, type = NULL, validation_data = NULL,
  validation_freq = 1, validation_split = 0, verbose = getOption("tfdist.verbose", 1),
  weight = NULL, workers = getOption("tfdist.workers")
)

# The options of each call.
barrier_train_options <- c(
  "workers", "batch_size", "epochs", "steps_per_epoch", "validation_data", "validation_split",
  "validation_freq", "callbacks", "class_weight", "seed", "shuffle", "features", "label", "weight",
  "data_options", "exchange", "recovery", "resources", "model_options", "verbose", "initial_epoch"
)
train_many_options <- c(
  "batch_size", "epochs", "steps_per_epoch", "validation_data", "validation_split",
  "validation_freq", "callbacks", "class_weight", "seed", "shuffle", "features", "label", "weight",
  "data_options", "exchange", "recovery", "resources", "model_options", "verbose"
)
barrier_evaluate_options <- c(
  "workers", "batch_size", "features", "label", "weight", "data_options", "resources",
  "model_options", "verbose", "timeout"
)
barrier_predict_options <- c(
  "workers", "batch_size", "type", "on_missing", "resources", "model_options", "verbose",
  "timeout"
)

# The names in Python of the functions that return a value for an argument.
python_makers <- c(
  data_options = "DataOptions", elastic = "Elastic", exchange = "Exchange", hosts = "hosts",
  kubernetes = "kubernetes", local_steps = "LocalSteps", model_options = "ModelOptions",
  parameter_server = "ParameterServer", recovery = "Recovery", resources = "Resources",
  slurm = "slurm", track_mlflow = "track_mlflow", track_tensorboard = "track_tensorboard",
  track_wandb = "track_wandb"
)

# Their arguments.
maker_arguments <- list()
maker_arguments$data_options <- alist(
  tensors = NULL, categories = NULL, tfrecord_spec = NULL, encode = NULL, repartition = TRUE,
  in_memory = FALSE
)
maker_arguments$elastic <- alist(workers = NULL, min = 1, max = NULL)
maker_arguments$exchange <- alist(
  transport = "tcp", compression = NULL, bucket_mb = NULL, loss_over = "rows", encrypt = NULL,
  audit = TRUE, shard_optimizer = FALSE, scale_lr = NULL
)
maker_arguments$hosts <- alist(
  hosts = NULL, ... = , hostfile = NULL, python = NULL, ssh_options = NULL, environment = NULL
)
maker_arguments$kubernetes <- alist(
  image = , ... = , namespace = NULL, context = NULL, cpus = NULL, memory = NULL, gpus = NULL,
  node_selector = NULL, tolerations = NULL, secrets = NULL, service_account = NULL,
  image_pull_secrets = NULL, time_limit = NULL, ttl = NULL, python = NULL, labels = NULL,
  patience = NULL
)
maker_arguments$local_steps <- alist(
  steps = , learning_rate = 1, momentum = 0, compression = NULL, encrypt = NULL
)
maker_arguments$model_options <- alist(uri = NULL, custom_objects = NULL, safe_mode = TRUE)
maker_arguments$parameter_server <- alist(servers = 1)
maker_arguments$recovery <- alist(
  uri = NULL, every = "epoch", keep = 2, resume = FALSE, restarts = 0, timeout = 300, pause = 5
)
maker_arguments$resources <- alist(
  cpus = NULL, memory = NULL, gpus = NULL, environment = NULL, fork_server = NULL
)
maker_arguments$slurm <- alist(
  partition = NULL, ... = , time = NULL, nodes = NULL, gpus = NULL, cpus = NULL, options = NULL,
  setup = NULL, folder = NULL, python = NULL, address = NULL, patience = NULL
)
maker_arguments$track_mlflow <- alist(
  experiment = NULL, ... = , run_name = NULL, tags = NULL, nested = FALSE, tracking_uri = NULL,
  steps = TRUE, log_model = TRUE
)
maker_arguments$track_tensorboard <- alist(folder = NULL)
maker_arguments$track_wandb <- alist(
  project = NULL, ... = , run_name = NULL, tags = NULL, group = NULL, steps = TRUE,
  log_model = TRUE
)
