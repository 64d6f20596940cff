#' Train a Keras model on several workers
#'
#' Starts `workers` processes, gives each its share of the rows, and runs the model's own `fit()` in
#' all of them at once. At every step the gradients are averaged over the workers, so that all of
#' them have the same weights: those of one process that trains on batches of `workers * batch_size`
#' rows. The trained model and its history come back to this session.
#'
#' @param sc Where the workers run:
#'   * `"local"` or `"local[N]"`: processes on this machine, without Spark;
#'   * `NULL`: all R and Python sessions that make this call together, if this one was started as
#'     one of several (see [join_workers()]); else this machine;
#'   * a connection from `sparklyr::spark_connect()`, including those of pysparklyr: tasks of that
#'     Spark application. Its executors need Python with TensorFlow, not R;
#'   * a PySpark `SparkSession`, classic or Connect, held by reticulate;
#'   * hosts that ssh reaches: [hosts()].
#' @param model A compiled Keras model, built through reticulate or the R package keras3; a
#'   [tfdist_fit], to train on from it (see [update.tfdist_fit()]); or an R function without
#'   arguments that returns a model, which is called in this session (with `seed`, if given, as
#'   Keras's seed).
#' @param data The rows to train on:
#'   * `list(x, y)` with arrays whose first dimension counts the rows; an optional third element is
#'     a weight for each row. `x` may be a list of arrays, one per input of the model; a named list
#'     is matched to the names of the inputs. Doubles reach Keras as float32, integers as int32,
#'     strings as text, one per row, for an input of strings. A factor `y` becomes codes that start
#'     at 0;
#'   * without labels, an array, a named list of arrays, or `list(x)`: the model trains as by
#'     `fit(x)`, and its `train_step` gets the same;
#'   * a data frame with the column `label`; the other columns, or those that `features` names,
#'     together make up one matrix. Factors and text are one-hot in it (see [data_options()]);
#'   * a sparklyr table (`tbl_spark`), or a dplyr pipeline or SQL query that has not been run yet,
#'     which reaches the workers without passing through R. Its columns contain numbers, arrays of
#'     numbers, ML vectors, bytes or text;
#'   * paths or URIs (with a scheme that Python's fsspec knows) of Parquet or TFRecord files, files,
#'     folders or patterns such as `"day=*/rows.parquet"`, which the workers read themselves: all
#'     their machines must share the paths;
#'   * an R function, called on each worker as `data(ctx)` with the worker's context (see
#'     [barrier_apply()], also for what travels with it and what the machines need), that returns a
#'     `tf.data.Dataset` of local batches `x`, `(x, y)` or `(x, y, sample_weight)`, which are used
#'     as they come; endless data need `steps_per_epoch`. Build it from TensorFlow's own operations:
#'     TensorFlow calls a generator from its own threads, in which R cannot run;
#'   * a PySpark or pandas DataFrame, a Python function, a tuple of numpy arrays, or whatever else
#'     Python's `barrier_train()` takes.
#' @param formula Instead of `label` and `features`: a formula, such as `y ~ a + b`, `y ~ .` or
#'   `y ~ . - id`, or a recipe. See the section on both.
#' @param ... Must be empty: the arguments that follow are given by name.
#' @param model_fn Instead of `model`: an R function without arguments that builds and compiles the
#'   model in every worker. Layers, losses and metrics may then be R functions or classes, too; to
#'   have such a model, the fit calls a copy of the function in this session, and puts the trained
#'   weights in. The function travels like that of [barrier_apply()], with the same requirements
#'   for the workers' machines.
#' @param label The label column of a data frame, table or files: a string, or a bare name as in
#'   dplyr, `label = Species`; for a model of several outputs a named list of them, `label =
#'   list(price = price, sold = is_sold)`. Text becomes 0, 1, 2, ... in sorted order, unless
#'   `data_options` lists its values as `categories`; the fit keeps them as `levels`, those of
#'   several labels as `categories`. If `model` is a fit, the label of its training need not be
#'   named again. `NULL`: the rows have no labels.
#' @param features The feature columns, which side by side form one input of the model: strings, or
#'   a selection as in `dplyr::select()`, `starts_with("Sepal")`, `c(a, b)`, `-id` (which leaves out
#'   the label and the weight as well). `NULL` uses all other columns. A named list forms several
#'   inputs, by their names in the model: `list(left = c(a, b), right = image)`. In a table or
#'   files, a text column that is an input of its own gives strings, unless `data_options` says
#'   `encode`. A variable that holds strings is looked up if no column has its name; `all_of()`
#'   makes sure of it.
#' @param weight Name of the column with the weight of each row in the loss; `NULL` weighs all rows
#'   equally.
#' @param data_options How columns are read and rows are stored, made by [data_options()]; `NULL`
#'   for its defaults.
#' @param workers Number of worker processes; `NULL`: 2, or as many as there are sessions that join
#'   (see [join_workers()]). The default is an option, see [tfdist_options].
#' @param min_workers Makes the training elastic, on this machine (`sc = "local"`), on [hosts()],
#'   on [slurm()] without `nodes`, where each worker is a job, or on [kubernetes()]: `workers` is
#'   the number to begin with, and training continues without a worker that fails or is preempted
#'   (SIGTERM), as long as this many are left. The processes of the others keep running. The
#'   epoch in which a worker fails is repeated from its beginning, and one that is preempted
#'   leaves after its epoch, so each epoch uses each row exactly once, and the result is that of
#'   one process on the batches of so many workers as each epoch had (`workers_by_epoch` of the
#'   fit). Every worker keeps all rows. `NULL`: a worker that is lost ends the training.
#' @param max_workers Others are started until there are so many, at the beginning and whenever a
#'   worker has gone; they join between two epochs, when they are ready. Of [hosts()] all slots are
#'   used, and one where none can be started is tried again every 30 seconds. `NULL`: none are.
#' @param epochs Number of the last epoch; the number of passes over the rows, unless
#'   `initial_epoch` skips some.
#' @param initial_epoch Number of epochs that count as done already, for schedules and callbacks.
#' @param batch_size Most rows per step in each worker; rows are spread evenly over the steps.
#' @param steps_per_epoch Number of steps in an epoch; `NULL` takes as many as the rows need.
#' @param validation_data Rows to evaluate the model on after an epoch, in any form that `data`
#'   takes.
#' @param validation_split Share of the rows, from the end of the arrays or the data frame and
#'   before any shuffling, that is kept for validation: a number from 0 to below 1.
#' @param validation_freq Validate after every so many epochs; or, as a vector, after the epochs
#'   with these numbers.
#' @param callbacks List of Keras callbacks (Python objects), which run in the workers, and of what
#'   [observer()] returns: R functions that are called in this session, and may stop the training.
#'   Files, as of `keras3::callback_csv_logger()`, are written where worker 0 runs: on this machine
#'   into the working directory, on a cluster best to a full path that all see.
#' @param class_weight Weight in the loss of the rows of each class, as a named vector or list:
#'   `c("0" = 1, "1" = 5)`; classes that are left out have the weight 1. If the label is a factor,
#'   the names may be its levels. Only for models with one output, and not together with a weight
#'   for each row.
#' @param seed A whole number that makes initial weights, shuffling and dropout repeatable; `NULL`
#'   draws one, which `set.seed()` decides if the session has called it. `fit$seed` is the one used.
#' @param shuffle `TRUE` or `"shard"`: each worker visits its rows in a new order in each epoch.
#'   `"global"`, for arrays, data frames and files: the workers share out a new order of all rows in
#'   each epoch, for which every worker keeps all of them. `FALSE`: rows are visited in their order.
#' @param exchange How the workers exchange what they have learned, made by [exchange()] or
#'   [local_steps()]; `NULL` for the defaults of `exchange()`.
#' @param scale_lr `"linear"` or `"sqrt"`: the learning rate is multiplied by the number of workers
#'   or by its square root, since a step has the rows of all of them. [scale_learning_rate()] adds
#'   warm-up and decay. The history has the rate of each epoch's last step, as `learning_rate`.
#'   `NULL`: the rate is that of the optimizer.
#' @param resources The cores, memory and GPUs of each worker, made by [resources()]; `NULL`:
#'   workers that share a machine divide its cores and GPUs.
#' @param model_uri Where the first worker writes the trained model, `.h5` or `.keras`, instead of
#'   sending it through this session: a path that all machines share, or a URI. Needed for models of
#'   a gigabyte. The fit reads the model from there.
#' @param checkpoint Where and how often the training is kept, made by [checkpoint()], or just a
#'   folder; `NULL`: nowhere.
#' @param resume Whether to go on from the newest intact checkpoint; without any, the training
#'   begins at its beginning. The same call must be made: another model, other data or settings are
#'   an error, but `epochs` may be raised. Between two epochs `workers` may change, too.
#' @param restarts How often the workers are started again if one is lost, killed, stopped or out of
#'   memory: from the newest checkpoint, or else from the beginning. With `checkpoint` also if
#'   workers were told to end (SIGTERM: preempted, evicted), or a job has reached its time limit.
#'   What the model, the data or a callback raises is not tried again.
#' @param strategy `"parameter_server"` trains asynchronously, by TensorFlow's own
#'   `ParameterServerStrategy`: the weights lie on parameter servers, and each worker takes steps on
#'   batches of its own rows without waiting for others. The result is *not* that of one process,
#'   and differs from run to run. An epoch has as many steps as all rows make batches; a faster
#'   worker takes more of them. A worker that is lost is done without (not on Spark, nor in sessions
#'   that join). `NULL`: synchronous, and exact.
#' @param roles With `strategy`, how many processes have which role, such as
#'   `c(chief = 1, worker = 2, ps = 1)`: one chief, which schedules the steps and has the model at
#'   the end. `NULL`: one parameter server, and `workers` is the number of those that take steps.
#' @param tensorboard Where to write what TensorBoard shows: the figures of each epoch, those of the
#'   first worker's rows every 50 steps and the graph. A folder of this machine, on any cluster: the
#'   first worker sends what it writes to this session, at each epoch's end and every 10 seconds.
#'   `TRUE`: a new folder in `logs`. A URI that TensorFlow can write to: the worker writes there
#'   itself. See [view_tensorboard()] and `tensorboard` of the fit; for a profile pass a
#'   `keras3::callback_tensorboard()` among the `callbacks`. `NULL`: nothing.
#' @param custom_objects Named list of Python classes and functions that the model needs in addition
#'   to Keras's own.
#' @param safe_mode Whether to refuse models that contain Python code (lambda layers).
#' @param verbose 0: silent; 1: progress; 2: also what the workers print. Progress is a bar with the
#'   loss, rows per second and the time that is left, in an interactive console, and elsewhere a
#'   line for each epoch: see [tfdist_options].
#' @param timeout Seconds that workers wait for each other to start, and after which a worker counts
#'   as lost that was stopped or whose machine does not answer. A slow one is waited for (six hours
#'   at most), and named once a minute.
#'
#' @return A [tfdist_fit] object.
#'
#' @section Formulas and recipes:
#' A formula of names alone selects columns of a data frame, a table or files; text and factors are
#' one-hot, with a column for each level, whatever their contrasts, and no intercept, which is the
#' model's bias. On a data frame it may also compute: `log(y) ~ poly(a, 2) + b:c`, by base R's
#' `model.frame()` and `model.matrix()`; a logical column is 0 or 1, and has a column for each in
#' an interaction such as `flag:a` without `a`. What the training data fix (levels, the mean in
#' `scale()`) is kept in the fit, and [predict.tfdist_fit()] and [barrier_evaluate()] compute the
#' same of later data frames. Variables of this session are not kept: write their values.
#' Predictions of `log(y)` are on that scale. On a Spark table a formula that computes is refused:
#' use `dplyr::mutate()` first.
#'
#' A recipe of the package recipes is prepared (`prep()`) by the data frame `data`, all of its rows,
#' unless it is prepared already; its outcome is the label, its predictors are the features, and
#' case weights weigh the rows. The fit keeps it and applies it to later data frames. Steps with
#' `skip = TRUE` are for the rows of the training alone: if one changes the label, validation and
#' evaluation, whose labels it would leave as they are, are refused. Spark tables are refused, since
#' recipes are R code for data frames.
#'
#' The columns are expanded in their order, a one-hot column into `column_level` for each of its
#' levels in their order: `feature_names` of the fit. A model that takes another number of inputs is
#' refused before the training, with these names. A row with a value that the training did not have
#' is predicted as missing later, and is an error in a training or an evaluation. What a recipe
#' makes of such a value is what its steps say: `step_dummy()` gives a missing one,
#' `step_integer()` 0.
#'
#' @section Runs of tfruns:
#' In a script that `tfruns::training_run()` has started, the run is told the figures of each epoch,
#' `samples`, `workers`, `epochs`, `batch_size`, and the model with its loss and optimizer, as
#' keras3's `fit()` does it: `tfruns::ls_runs()` lists them.
#'
#' @section Errors:
#' Wrong arguments are reported at once, before Python or a cluster is used. See [tfdist_error] for
#' the classes of errors and what they carry.
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

#' Show what a training would start
#'
#' `plan()` makes all checks of [barrier_train()] and starts nothing: no worker, and no job of Spark
#' but those that find the values of text.
#'
#' @inheritParams barrier_train
#'
#' @return An object of class `tfdist_plan`, which is printed as text. Its elements: `launcher`,
#'   `workers` (a data frame of `rank`, `role`, `place` and `rows`), `data`, `validation_data`,
#'   `rows`, `steps_per_epoch`, `which_rows`, `model`, `settings`, `documents` (what would be
#'   submitted to Kubernetes or Slurm), and `later`: what is known only when the training starts.
#' @section Errors:
#' As those of [barrier_train()] before it starts anything.
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

# The arguments of a training, in the frame of its call, checked.
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
  # A recipe has its own, also in a fit that is trained on.
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

# From R's random numbers, if any were drawn or set.seed() was called: then that repeats a training.
# Sessions that join each make the call, and must have one seed.
draw_seed <- function(route) {
  if (!is.null(route$sc) && exists(".Random.seed", globalenv(), inherits = FALSE)) {
    sample.int(.Machine$integer.max, 1L)
  }
}

# Arguments of barrier_train() that reach Python as they are.
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

# Whether the workers must be able to run R for these data.
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
