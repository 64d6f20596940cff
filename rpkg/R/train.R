#' Train a Keras model on several workers
#'
#' Starts `workers` processes, gives each its shard of the rows, and runs the model's own `fit()` in
#' all of them at once. In every step an all-reduce averages the gradients, so that all workers have
#' the same weights: those of one process that trains on the same global batches of
#' `workers * batch_size` rows. The trained model and its history come back to this session.
#'
#' @param sc Where the workers run:
#'   * `"local"` or `"local[N]"`: processes on this machine, without Spark;
#'   * [hosts()], [slurm()] or [kubernetes()]: machines over ssh, a Slurm job, or pods;
#'   * a connection from `sparklyr::spark_connect()`, including those of pysparklyr: tasks of that
#'     Spark application. Its executors need Python with TensorFlow, but not R;
#'   * a PySpark `SparkSession`, classic or Connect, held by reticulate;
#'   * `NULL`: all R and Python sessions that were started together and make this call (see
#'     [join_workers()]), or this machine if there is only this session.
#' @param model A compiled Keras model, built through reticulate or the R package keras3; a
#'   [tfdist_fit], to continue its training (see [update.tfdist_fit()]); or an R function without
#'   arguments that returns a model. The function is called in this session, with `seed`, if given,
#'   as Keras's seed.
#' @param data The rows to train on: `list(x, y)` of arrays, a data frame, a Spark table, paths of
#'   Parquet or TFRecord files, or an R function that returns a data set on each worker. See the
#'   section on data.
#' @param formula Instead of `label` and `features`: a formula, such as `y ~ a + b`, `y ~ .` or
#'   `y ~ . - id`, or a recipe. See the section on both.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param model_fn Instead of `model`: an R function without arguments that builds and compiles the
#'   model on every worker. Layers, losses and metrics may then be R functions or classes, too. To
#'   return such a model, the fit calls a copy of the function in this session, and sets the trained
#'   weights. The function is sent like that of [barrier_apply()], with the same requirements for
#'   the workers' machines.
#' @param label The label column of a data frame, table or files: a string, or a bare name as in
#'   dplyr, `label = Species`. For a model with several outputs, a named list of columns:
#'   `label = list(price = price, sold = is_sold)`. Text becomes 0, 1, 2, ... in sorted order,
#'   unless `data_options` lists its values as `categories`. The fit stores the values as `levels`,
#'   those of several labels as `categories`. If `model` is a fit, the default is the label of its
#'   training. `NULL`: the rows have no labels.
#' @param features The feature columns, which form one input of the model: strings, or a selection
#'   as in `dplyr::select()`, such as `starts_with("Sepal")`, `c(a, b)`, or `-id` (which also leaves
#'   out the label and the weight). `NULL` (default): all other columns. A named list forms several
#'   inputs, by their names in the model: `list(left = c(a, b), right = image)`. In a table or
#'   files, a text column that is an input by itself becomes strings, unless `data_options` has
#'   `encode`. A variable that holds strings is used if no column has its name; `all_of()` makes
#'   this explicit.
#' @param weight Column with the weight of each row in the loss. `NULL` (default): all rows have the
#'   same weight.
#' @param data_options Options for reading columns and storing rows, made by [data_options()].
#'   `NULL`: its defaults.
#' @param workers Number of workers. `NULL`: 2, or the number of sessions that join (see
#'   [join_workers()]). The default is an option, see [tfdist_options].
#' @param min_workers Makes the training elastic: it continues without workers that fail or are
#'   preempted, as long as this many are left. `NULL` (default): a lost worker ends the training.
#'   See the section on elastic training.
#' @param max_workers In an elastic training, new workers are started until there are this many.
#'   `NULL` (default): lost workers are not replaced.
#' @param epochs Number of the last epoch. This is the number of passes over the rows, unless
#'   `initial_epoch` skips some.
#' @param initial_epoch Number of epochs that count as completed, for schedules and callbacks.
#' @param batch_size Maximum rows per step on each worker. Rows are spread evenly over the steps.
#' @param steps_per_epoch Number of steps in an epoch. `NULL` (default): as many as all rows need.
#' @param validation_data Rows to evaluate the model on after an epoch, in any form that `data`
#'   accepts.
#' @param validation_split Fraction of the rows to use for validation, from 0 to below 1. They are
#'   the last rows of the arrays or the data frame, before shuffling.
#' @param validation_freq Number of epochs between validations; or a vector of the epochs to
#'   validate after.
#' @param callbacks List of Keras callbacks (Python objects), which run on the workers, and of
#'   observers, made by [observer()]: R functions that run in this session and may stop the
#'   training. Files, such as those of `keras3::callback_csv_logger()`, are written where worker 0
#'   runs: on this machine in the working directory; on a cluster, use a full path that all machines
#'   share.
#' @param class_weight Weight in the loss of the rows of each class, as a named vector or list:
#'   `c("0" = 1, "1" = 5)`. Classes that are left out have the weight 1. If the label is a factor,
#'   the names may be its levels. Only for models with one output, and not together with a weight
#'   for each row.
#' @param seed A whole number that makes initial weights, shuffling and dropout repeatable. `NULL`
#'   (default): drawn at random, from R's random numbers if `set.seed()` was called. `fit$seed` is
#'   the seed that was used.
#' @param shuffle `TRUE` (default) or `"shard"`: each worker shuffles its own rows in each epoch.
#'   `"global"`, for arrays, data frames and files: all rows are shuffled and redistributed in each
#'   epoch, for which every worker stores all of them. `FALSE`: rows keep their order.
#' @param exchange Options for the exchange between workers, made by [exchange()] or
#'   [local_steps()]. `NULL`: the defaults of `exchange()`.
#' @param scale_lr `"linear"` or `"sqrt"`: multiplies the learning rate by the number of workers or
#'   by its square root, because a step has the rows of all workers. [scale_learning_rate()] adds
#'   warm-up and decay. The history has the rate of each epoch's last step as `learning_rate`.
#'   `NULL` (default): the optimizer's rate.
#' @param resources The cores, memory and GPUs of each worker, made by [resources()]. `NULL`
#'   (default): workers on the same machine divide its cores and GPUs.
#' @param model_uri Where the first worker writes the trained model, `.h5` or `.keras`, instead of
#'   sending it through this session: a path that all machines share, or a URI. The fit reads the
#'   model from there. Needed for models of a gigabyte or more.
#' @param checkpoint Where and how often the training is saved, made by [checkpoint()], or only a
#'   folder. `NULL` (default): nothing is saved.
#' @param resume `TRUE` resumes from the newest intact checkpoint, or starts from the beginning if
#'   there is none. The call must be the same: another model, other data or other settings raise an
#'   error, but `epochs` may be larger. Between two epochs `workers` may change, too.
#' @param restarts Number of times that the workers are restarted after one was lost, killed,
#'   stopped or out of memory: from the newest checkpoint, or else from the beginning. With
#'   `checkpoint` also after a preemption (SIGTERM, an eviction) and after the time limit of a job.
#'   Errors that the model, the data or a callback raises are not retried.
#' @param strategy `"parameter_server"`: asynchronous training with TensorFlow's own
#'   `ParameterServerStrategy`. The weights are on parameter servers, and each worker takes steps on
#'   batches of its own rows without waiting for others. The result is *not* that of one process,
#'   and differs from run to run. An epoch has as many steps as all rows make batches; a faster
#'   worker takes more of them. Training continues without a lost worker, except on Spark and in
#'   sessions that join. `NULL` (default): synchronous and exact.
#' @param roles With `strategy`, the number of processes by role, such as
#'   `c(chief = 1, worker = 2, ps = 1)`. The one chief schedules the steps and has the model at the
#'   end. `NULL` (default): a chief, one parameter server, and `workers` workers that take steps.
#' @param tensorboard Folder of this machine for TensorBoard's event files: the metrics of each
#'   epoch, those of the first worker's rows every 50 steps, and the graph. On every cluster, the
#'   first worker sends them to this session at the end of each epoch and every 10 seconds. `TRUE`:
#'   a new folder in `logs`. A URI that TensorFlow can write to: the worker writes there directly.
#'   See [view_tensorboard()] and `tensorboard` of the fit. For a profile, pass a
#'   `keras3::callback_tensorboard()` in `callbacks`. `NULL` (default): nothing is written.
#' @param custom_objects Named list of Python classes and functions that the model needs in addition
#'   to Keras's own.
#' @param safe_mode `FALSE`: a model that `model_fn` builds may come back as a whole file although
#'   it contains Python code (a lambda layer). `TRUE` (default): its weights come back, and a copy
#'   of `model_fn` rebuilds the model here. A model that you pass needs no such permission.
#' @param verbose 0: silent; 1: progress; 2: also what the workers print. In an interactive console,
#'   progress is a bar with the loss, rows per second and the remaining time; elsewhere it is a line
#'   for each epoch. See [tfdist_options].
#' @param timeout Seconds that workers wait for each other to start. After the same time, a worker
#'   that was stopped or whose machine does not answer counts as lost. A worker that is only slow is
#'   waited for, six hours at most, and named once a minute.
#'
#' @return A [tfdist_fit] object.
#'
#' @section Data:
#' `data` is one of
#' * `list(x, y)` of arrays whose first dimension counts the rows. An optional third element is a
#'   weight for each row. `x` may be a list of arrays, one per input of the model; a named list is
#'   matched to the names of the inputs. Doubles become float32, integers int32, and strings text,
#'   one per row, for an input of strings. A factor `y` becomes codes from 0;
#' * an array, a named list of arrays, or `list(x)`, for data without labels. The model trains as by
#'   `fit(x)`, and its `train_step` gets the same;
#' * a data frame with the column `label`. The other columns, or those in `features`, form one
#'   matrix. Factors and text become one-hot columns (see [data_options()]);
#' * a sparklyr table (`tbl_spark`), or a dplyr pipeline or SQL query that has not been run yet. Its
#'   rows reach the workers without passing through R. Its columns contain numbers, arrays of
#'   numbers, ML vectors, bytes or text;
#' * paths or URIs (with a scheme that Python's fsspec supports) of Parquet or TFRecord files:
#'   files, folders or patterns such as `"day=*/rows.parquet"`. The workers read them themselves, so
#'   all their machines must share the paths;
#' * an R function `data(ctx)`, called on each worker with its context, that returns a
#'   `tf.data.Dataset` of local batches `x`, `(x, y)` or `(x, y, sample_weight)`. They are used
#'   unchanged. Infinite data need `steps_per_epoch`. [barrier_apply()] describes the context, what
#'   is sent with the function, and what the machines need. Build the data set from TensorFlow's own
#'   operations: TensorFlow calls a generator from its own threads, in which R cannot run;
#' * a PySpark or pandas DataFrame, a Python function, a tuple of numpy arrays, or any other data of
#'   Python's `barrier_train()`.
#'
#' @section Elastic training:
#' `min_workers` works on this machine (`sc = "local"`), on [hosts()], on [kubernetes()], and on
#' [slurm()] without `nodes`, where each worker is a job. Training starts with `workers` workers.
#' When one fails, the processes of the others stay alive, and the epoch is repeated from its
#' beginning. A preempted worker (SIGTERM) leaves at the end of its epoch. So each epoch uses each
#' row exactly once, and the result is that of one process on the batches of as many workers as each
#' epoch had (`workers_by_epoch` of the fit). Every worker stores all rows.
#'
#' With `max_workers`, workers are added at the beginning and whenever a worker is lost. They join
#' between two epochs, as soon as they are ready. On [hosts()] all slots are used; a slot in which a
#' worker fails to start is retried after 30 seconds, and then after pauses that double up to 16
#' minutes.
#'
#' @section Formulas and recipes:
#' A formula that only names columns selects them from a data frame, a table or files. Text and
#' factors become one-hot, with a column for each level, regardless of their contrasts. There is no
#' intercept, because the model has its bias. On a data frame a formula may also compute:
#' `log(y) ~ poly(a, 2) + b:c`, by base R's `model.frame()` and `model.matrix()`. A logical column
#' is 0 or 1, and has a column for each in an interaction such as `flag:a` without `a`. Values from
#' the training data (levels, the mean in `scale()`) are stored in the fit, and
#' [predict.tfdist_fit()] and [barrier_evaluate()] apply them to later data frames. Variables
#' from this session are not stored: write their values into the formula. Predictions of `log(y)`
#' are on that scale. On a Spark table, a formula that computes raises an error: use
#' `dplyr::mutate()` first.
#'
#' A recipe of the package recipes is prepared (`prep()`) with all rows of the data frame `data`,
#' unless it is already prepared. Its outcome is the label, its predictors are the features, and
#' case weights are the weights of the rows. The fit stores the recipe and applies it to later data
#' frames. Steps with `skip = TRUE` apply only to the rows of the training. If such a step changes
#' the label, validation and evaluation raise an error, because their labels would not be changed.
#' Spark tables raise an error, too, because recipes are R code for data frames.
#'
#' The columns are expanded in their order, a one-hot column into `column_level` for each of its
#' levels in their order: `feature_names` of the fit. A model with another number of inputs raises
#' an error with these names before the training. A row with a value that was not in the training is
#' later predicted as missing, and raises an error in training or evaluation. For a recipe, its
#' steps decide: `step_dummy()` gives a missing value, `step_integer()` 0.
#'
#' @section Runs of tfruns:
#' In a script that `tfruns::training_run()` has started, the run records the metrics of each epoch,
#' `samples`, `workers`, `epochs`, `batch_size`, and the model with its loss and optimizer, as with
#' keras3's `fit()`. `tfruns::ls_runs()` lists them.
#'
#' @section Errors:
#' Wrong arguments raise an error at once, before Python or a cluster is used. See [tfdist_error]
#' for the classes of errors and their fields.
#'
#' @seealso [train_mnist()] for a complete first run, [predict.tfdist_fit()], [write_model()];
#'   [barrier_evaluate()] and [barrier_predict()] to use a model on several workers.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && requireNamespace("keras3")
#' library(keras3)
#' new_model <- function() {
#'   keras_model_sequential(input_shape = 4) |>
#'     layer_dense(16, activation = "relu") |>
#'     layer_dense(3, activation = "softmax") |>
#'     compile("adam", "sparse_categorical_crossentropy", metrics = "accuracy")
#' }
#' fit <- barrier_train("local", new_model, iris, Species ~ ., workers = 2, epochs = 3)
#' fit
#' predict(fit, head(iris))
#'
#' \dontrun{
#' # The same on Spark, with rows that stay there.
#' sc <- sparklyr::spark_connect(master = "yarn")
#' digits <- dplyr::tbl(sc, "digits")
#' fit <- barrier_train(sc, new_model, digits, label = "digit", workers = 8, epochs = 5)
#'
#' # Files that the workers read themselves, with images as bytes and a weight for each row.
#' fit <- barrier_train(
#'   sc,
#'   new_model,
#'   "s3://bucket/digits",
#'   label = "digit",
#'   features = "image",
#'   weight = "weight",
#'   data_options = data_options(tensors = list(image = list("uint8", c(28, 28)))),
#'   workers = 8
#' )
#'
#' # Batches that a function makes on each worker, over a slow network.
#' batches <- function(ctx) {
#'   tf <- reticulate::import("tensorflow")
#'   files <- tf$data$Dataset$list_files("/data/part-*", shuffle = FALSE)
#'   read_batches(files$shard(ctx$world_size, ctx$rank))
#' }
#' fit <- barrier_train(sc, new_model, batches, workers = 8, exchange = local_steps(20))
#' }
barrier_train <- function(
  sc,
  model = NULL,
  data = NULL,
  formula = NULL,
  ...,
  model_fn = NULL,
  label = "label",
  features = NULL,
  weight = NULL,
  data_options = NULL,
  workers = getOption("tfdist.workers"),
  min_workers = NULL,
  max_workers = NULL,
  epochs = 1L,
  initial_epoch = 0L,
  batch_size = 32L,
  steps_per_epoch = NULL,
  validation_data = NULL,
  validation_split = 0,
  validation_freq = 1L,
  callbacks = NULL,
  class_weight = NULL,
  seed = NULL,
  shuffle = TRUE,
  exchange = NULL,
  scale_lr = NULL,
  resources = NULL,
  model_uri = NULL,
  checkpoint = NULL,
  resume = FALSE,
  restarts = 0,
  strategy = NULL,
  roles = NULL,
  tensorboard = NULL,
  custom_objects = NULL,
  safe_mode = TRUE,
  verbose = getOption("tfdist.verbose", 1),
  timeout = 300
) {
  check_dots_empty(...)
  training <- prepare_training()
  kept <- keep_builder(model, model_fn)
  columns <- training$columns
  settings <- training$settings
  informs <- settings$verbose > 0L && !inherits(model, "tfdist_fit")
  informs <- informs && is.null(label_values(columns))
  if (informs) {
    inform_levels(columns$levels)
  }

  result <- run_training(training, pybackend(rlang::current_env())$barrier_train)
  columns$feature_names <- training$data$feature_names
  columns$encode_of_data <- training$data$encode
  fit <- new_fit(
    result,
    columns,
    settings$custom_objects,
    settings$safe_mode,
    c(settings, list(exchange = exchange)),
    match.call(),
    kept
  )
  if (informs && is.null(columns$levels)) {
    # Text in a table or in files, whose values only the workers see.
    inform_levels(fit$levels)
  }
  record_training(fit)
  fit
}

#' Show what a training run would start
#'
#' `plan()` makes all checks of [barrier_train()] and starts no worker. Spark runs only the jobs
#' that find the values of text.
#'
#' @inheritParams barrier_train
#'
#' @return An object of class `tfdist_plan`, which prints as text. Its elements: `launcher`,
#'   `workers` (a data frame of `rank`, `role`, `place` and `rows`), `data`, `validation_data`,
#'   `rows`, `steps_per_epoch`, `which_rows`, `model`, `settings`, `documents` (what would be
#'   submitted to Kubernetes or Slurm), and `later`: what is known only after the training has
#'   started.
#' @section Errors:
#' Those of [barrier_train()] before it starts anything.
#' @seealso [barrier_train()]
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && requireNamespace("keras3")
#' new_model <- function() {
#'   keras3::keras_model_sequential(input_shape = 4) |>
#'     keras3::layer_dense(3, activation = "softmax") |>
#'     keras3::compile("adam", "sparse_categorical_crossentropy")
#' }
#' tfdist::plan("local", new_model, iris, Species ~ ., workers = 2, epochs = 3)
plan <- rlang::new_function(
  formals(barrier_train),
  quote({
    check_dots_empty(...)
    training <- prepare_training()
    new_plan(run_training(training, pybackend(rlang::current_env())$plan))
  }),
  environment(barrier_train)
)

# The arguments of a training run, in the frame of its call, checked.
prepare_training <- function(frame = caller_env()) {
  names <- c("sc", "model", "model_fn", "data", "formula", "data_options", "validation_data")
  args <- mget(c(names, "exchange", "shuffle", "class_weight"), envir = frame)
  model <- args$model
  route <- check_sc(args$sc, arg = "sc", call = frame)
  check_one_model(model, args$model_fn, call = frame)
  check_options(args$exchange, c("exchange", "local_steps"), arg = "exchange", call = frame)
  is_fit <- inherits(model, "tfdist_fit")
  check_no_formula(args$formula, is_fit, call = frame)
  named <- named_columns(frame)
  if (is.null(named$label) && is_fit) {
    named$label <- scored_label(model, args$data)
  }
  given <- choose_columns(
    named,
    args$formula,
    args$data_options,
    args$data,
    call = frame
  )
  columns <- complete_columns(given, model, call = frame)
  # A recipe has its own weights, also in a fit whose training continues.
  columns$weight <- columns$weight %||% columns$preparation$weight
  settings <- complete_settings(check_arguments(training_settings, frame), model)
  settings["seed"] <- list(settings$seed %||% draw_seed(route))
  check_epochs(settings, call = frame)
  check_can_prepare(columns$preparation, args$data, "data", frame)
  data <- check_data(args$data, columns, route, arg = "data", call = frame)
  check_shuffled(data, args$shuffle, call = frame)
  if (!is.null(columns$levels)) {
    data <- match_levels(data, columns$levels, call = frame)
  }
  columns <- narrow_columns(columns, data)
  validation <- check_data(
    args$validation_data,
    columns,
    route,
    allow_null = TRUE,
    arg = "validation_data",
    call = frame
  )
  check_validation_split(settings$validation_split, data, validation, call = frame)
  validation <- match_levels(validation, label_levels(data), "validation_data", call = frame)
  check_has_columns(given, data, validation, call = frame)
  check_can_resume(settings, call = frame)
  list(
    route = route,
    model = list(model = model, model_fn = args$model_fn),
    data = data,
    validation = validation,
    columns = columns,
    exchange = args$exchange,
    settings = settings,
    class_weight = class_weight_codes(args$class_weight, data, call = frame),
    call = frame
  )
}

# From R's random numbers, if any were drawn or set.seed() was called, so that set.seed() makes a
# training repeatable. Not for sessions that join: they must all have the same seed.
draw_seed <- function(route) {
  if (!is.null(route$sc) && exists(".Random.seed", globalenv(), inherits = FALSE)) {
    sample.int(.Machine$integer.max, 1L)
  }
}

# Arguments of barrier_train() that have the same names in Python.
training_settings <- c(
  c("workers", "min_workers", "max_workers", "epochs", "initial_epoch", "batch_size"),
  "steps_per_epoch",
  c("validation_split", "validation_freq", "callbacks", "class_weight", "seed", "shuffle"),
  c("scale_lr", "resources", "model_uri", "checkpoint", "resume", "restarts", "strategy", "roles"),
  "tensorboard",
  c("custom_objects", "safe_mode", "verbose", "timeout")
)

# `fn` is Python's barrier_train() or plan().
run_training <- function(training, fn) {
  call <- training$call
  route <- training$route
  model <- training$model
  data <- training$data
  validation <- training$validation
  settings <- replace(training$settings, "class_weight", list(training$class_weight))
  session <- open_session(route, call)
  runs_r <- !is.null(model$model_fn) || is_rebuilt(model$model)
  runs_r <- runs_r || is_r_function(data) || is_r_function(validation)
  model <- if (is.null(model$model_fn)) {
    announce_tensorflow(model$model, settings$verbose)
    as_sent_model(model$model, call, settings$seed)
  } else {
    as_r_function(model$model_fn, NULL, identity, arg = "model_fn", call = call)
  }
  if (!runs_r) {
    check_inputs(model, data$feature_names, call)
    check_label_levels(model, data$y, call)
  }
  launcher <- if (runs_r) open_r_workers(route, call) else session
  settings <- lapply(settings, null_if_empty)
  settings$callbacks <- as_python_callbacks(settings$callbacks, call)
  settings$exchange <- as_python_options(training$exchange, call)
  settings$checkpoint <- as_python_options(settings$checkpoint, call)
  settings$scale_lr <- as_python_options(settings$scale_lr, call)
  settings$resources <- as_python_options(settings$resources, call)
  train <- function(rows, validation_rows) {
    columns <- add_label_levels(training$columns, validation, validation_rows)
    arguments <- c(
      list(fn, launcher, model, rows, call = call),
      list(validation_data = validation_rows),
      settings,
      as_python_columns(columns, data, validation, call)
    )
    do.call(call_python, arguments)
  }
  with_python_data(data, session, call = call, code = function(rows) {
    with_python_data(
      validation,
      session,
      function(validation_rows) train(rows, validation_rows),
      arg = "validation_data",
      call = call
    )
  })
}

# TRUE if the workers must run R for these data.
is_r_function <- function(data) identical(data$kind, "function")

check_one_model <- function(model, model_fn, call = caller_env()) {
  if (is.null(model_fn)) {
    return(check_model(model, arg = "model", call = call))
  }
  if (!is.null(model)) {
    abort_input(
      c(
        "`model` and `model_fn` cannot be used together.",
        i = "Use `model` to send a model, or `model_fn` to have each worker build it."
      ),
      call = call
    )
  }
  if (is.primitive(model_fn) || is_python(model_fn)) {
    abort_expected(model_fn, "an R function without arguments", FALSE, "model_fn", call)
  }
  check_model(model_fn, "an R function without arguments", arg = "model_fn", call = call)
}
