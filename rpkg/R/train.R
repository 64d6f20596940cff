#' Train a Keras model on several workers
#'
#' Starts `workers` processes, gives each its shard of the rows, and runs the model's own `fit()` in
#' all of them at once. In every step, an all-reduce averages the gradients, so that all workers
#' have the same weights as one process that trains on the same global batches of
#' `workers * batch_size` rows. The trained model and its history are returned to this session.
#'
#' @inheritParams call_options
#' @param sc Where the workers run:
#'   * `"local"` or `"local[N]"`: processes on this machine, without Spark;
#'   * [hosts()], [slurm()] or [kubernetes()]: machines over ssh, a Slurm job, or pods;
#'   * a connection from `sparklyr::spark_connect()`, including those of pysparklyr: tasks of that
#'     Spark application. Its executors need Python with TensorFlow, but not R;
#'   * a PySpark `SparkSession`, classic or Connect, obtained through reticulate;
#'   * `NULL`: all R and Python sessions that were started together and make this call (see
#'     [join_workers()]), or this machine if there is only this session.
#' @param model A compiled Keras model, built through reticulate or the keras3 package for R; a
#'   [tfdist_fit], to continue its training (see [update.tfdist_fit()]); or an R function that takes
#'   no arguments and returns a model. The function is called in this session. If you pass `seed`,
#'   it is used as Keras's random seed.
#' @param data The rows to train on: `list(x, y)` of arrays, a data frame, a Spark table, paths to
#'   Parquet or TFRecord files, or an R function that returns a data set on each worker. See the
#'   section on data.
#' @param formula Instead of `label` and `features`: a formula, such as `y ~ a + b`, `y ~ .` or
#'   `y ~ . - id`, or a recipe. See the section on formulas and recipes.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param model_fn Instead of `model`: an R function that takes no arguments. It builds and compiles
#'   the model on every worker. Layers, losses and metrics may then be R functions or classes, too.
#'   To return such a model, the fit calls a copy of the function in this session and loads the
#'   trained weights into the model. The function is sent to the workers like `f` in
#'   [barrier_apply()], with the same requirements for their machines.
#' @param label The label column of a data frame, table or files: a string, or a bare name as in
#'   dplyr, such as `label = Species`. For a model with several outputs, a named list of columns:
#'   `label = list(price = price, sold = is_sold)`. Text becomes 0, 1, 2, ... in sorted order,
#'   unless `data_options` lists its values as `categories`. The fit stores the values as `levels`,
#'   or, for several labels, as `categories`. If `model` is a fit, the default is the label that it
#'   was trained with. `NULL`: the rows have no labels.
#' @param features The feature columns, which form one input of the model: strings, or a selection
#'   as in `dplyr::select()`, such as `starts_with("Sepal")`, `c(a, b)`, or `-id` (which also leaves
#'   out the label and the weight). `NULL` (default): all other columns. A named list forms several
#'   inputs; its names are the names of the inputs in the model:
#'   `list(left = c(a, b), right = image)`. In a table or files, a text column that is the only
#'   column of an input is passed to the model as strings, unless `data_options` has `encode`. A
#'   variable that holds strings is used if no column has its name; `all_of()` makes this explicit.
#' @param batch_size Maximum rows per step on each worker. All workers together take the batches of
#'   `fit()` with `batch_size = workers * batch_size`. If their shares differ in size, as partitions
#'   of a Spark table do, rows are spread evenly over the steps.
#' @param callbacks List of Keras callbacks, observers and trackers. Keras callbacks (Python
#'   objects) run on the workers. Observers, created by [observer()], consist of R functions that
#'   run in this session and may stop training. [track_mlflow()], [track_wandb()] and
#'   [track_tensorboard()] record the run. Files, such as those of `keras3::callback_csv_logger()`,
#'   are written where worker 0 runs. On this machine, that is the working directory. On a cluster,
#'   use a full path that all machines share.
#' @param class_weight Weight of each class in the loss, as a named vector or list:
#'   `c("0" = 1, "1" = 5)`. Classes that are left out have a weight of 1. If the label is a factor,
#'   the names may be its levels. Only for models with one output, and not in combination with row
#'   weights.
#' @param seed A whole number that makes initial weights, shuffling and dropout repeatable. `NULL`
#'   (default): drawn at random, using R's random number generator if `set.seed()` was called.
#'   `fit$seed` is the seed that was used.
#' @param verbose 0 shows nothing, 1 shows progress, and 2 also shows what the workers print. In an
#'   interactive console, progress is a bar with the loss, rows per second and the remaining time;
#'   elsewhere it is a line for each epoch. `suppressMessages()` also hides it. See
#'   [tfdist_options].
#' @return A [tfdist_fit] object.
#' @section Data:
#' `data` is one of
#' * `list(x, y)` of arrays with rows along the first dimension. An optional third element is a
#'   weight for each row. `x` may be a list of arrays, one per input of the model; a named list is
#'   matched to the names of the inputs. Doubles become float32, integers become int32, and strings,
#'   one per row, are passed to a string input. A factor `y` becomes codes from 0;
#' * an array, a named list of arrays, or `list(x)`, for data without labels. The model is trained
#'   as with Keras's `fit(x)`, so its `train_step` receives the same data as with `fit(x)`;
#' * a data frame that contains the label column. The other columns, or those in `features`, form
#'   one matrix. Factors and text become one-hot columns (see [data_options()]);
#' * a sparklyr table (`tbl_spark`), or a dplyr pipeline or SQL query that has not been run yet. Its
#'   rows reach the workers without passing through R. Its columns contain numbers, arrays of
#'   numbers, ML vectors, bytes, text or lists of text; `features = "s.a"` is a field of a struct;
#' * paths or URIs (with a scheme that Python's fsspec supports) for Parquet or TFRecord files:
#'   files, folders or patterns such as `"day=*/rows.parquet"`. The workers read them themselves, so
#'   all their machines must share the paths;
#' * an R function `data(ctx)`, called on each worker with its context, that returns a
#'   `tf.data.Dataset` of local batches `x`, `(x, y)` or `(x, y, sample_weight)`. The batches are
#'   used unchanged. Infinite data require `steps_per_epoch`. [barrier_apply()] describes the
#'   context, what is sent with the function, and what the machines need. Build the data set with
#'   TensorFlow's own operations: TensorFlow calls a generator from its own threads, where R cannot
#'   run;
#' * a PySpark or pandas DataFrame, a Python function, a tuple of numpy arrays, or any other data
#'   that `barrier_train()` accepts in Python.
#' @section Elastic training:
#' `workers = elastic()` works on this machine (`sc = "local"`), on [hosts()], on Spark, on
#' [slurm()] and on [kubernetes()]. On Spark, each worker is a Spark job with one task, so the
#' others continue when an executor is lost. On [slurm()], each worker is a job, or with `nodes` a
#' step of one job. Training starts with `workers` workers. When one fails, the other processes stay
#' alive. They repeat the step that failed, and share the rows that the epoch has not used yet. A
#' preempted worker (SIGTERM) leaves at the end of its epoch. Each epoch therefore uses each row
#' exactly once. The result is the same as that of one process that trains on the same global
#' batches, whose size depends on the number of workers (see `generations` in the fit). For some
#' models, such as those with their own `train_step`, the whole epoch is repeated; a note gives the
#' reason. Every worker stores all rows. [recovery()] is for the case that fewer than `min` workers
#' are left or that your session dies. Training then resumes at any step, with any number of
#' workers, and `generations` lists the worker groups from the beginning.
#'
#' With `max`, workers are added at the beginning and whenever a worker is lost. They join between
#' two epochs or when a worker is lost, as soon as they are ready. They use any free slot of the
#' hosts or of the Spark session, or any free task of the nodes. If a worker fails to start in a
#' slot, the slot is retried after 30 seconds, and then at intervals that double, up to 16 minutes.
#' @section Formulas and recipes:
#' A formula that only names columns selects them from a data frame, a table or files. Text and
#' factors become one-hot columns, one for each level, regardless of their contrasts. There is no
#' intercept, because the model has its own bias. On a data frame, a formula may also transform
#' columns with base R's `model.frame()` and `model.matrix()`, as in `log(y) ~ poly(a, 2) + b:c`. A
#' logical column becomes 0 or 1. In an interaction without the main effect, such as `flag:a`
#' without `a`, it becomes a column for each of these values. Values from the training data (levels,
#' the mean in `scale()`) are stored in the fit, and [predict.tfdist_fit()] and [barrier_evaluate()]
#' apply them to later data frames. Variables from this session are not stored, so write their
#' values into the formula. Predictions of `log(y)` are on the log scale. On a Spark table, a
#' formula that transforms columns raises an error: use `dplyr::mutate()` first.
#'
#' A recipe from the recipes package is prepared (`prep()`) with all rows of the data frame `data`,
#' unless it is already prepared. Its outcome is used as the label, its predictors as the features,
#' and its case weights as row weights. The fit stores the recipe and applies it to later data
#' frames. Steps with `skip = TRUE` apply only to the training rows. If such a step changes the
#' label, validation and evaluation raise an error, because their labels would not be changed. Spark
#' tables raise an error, too, because recipes are R code for data frames.
#'
#' The columns are expanded in order. A one-hot column becomes one column for each of its levels,
#' named `column_level`, also in order. The fit stores these names as `feature_names`. A model that
#' expects a different number of columns raises an error with these names before training. Later,
#' the prediction for a row with a value that was not in the training data is missing; in training
#' or evaluation, such a row raises an error. With a recipe, the result depends on its steps:
#' `step_dummy()` produces a missing value, and `step_integer()` produces 0.
#' @section Use with tfruns:
#' In a script started by `tfruns::training_run()`, tfruns records the metrics of each epoch,
#' `samples`, `workers`, `epochs`, `batch_size`, and the model with its loss and optimizer, as with
#' keras3's `fit()`. `tfruns::ls_runs()` lists them.
#' @section Errors:
#' Invalid arguments raise an error immediately, before a cluster is used. See [tfdist_error] for
#' the classes of errors and their fields.
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
#' # Batches that a function creates on each worker, and weights averaged over a slow network.
#' batches <- function(ctx) {
#'   tf <- reticulate::import("tensorflow")
#'   files <- tf$data$Dataset$list_files("/data/part-*", shuffle = FALSE)
#'   read_batches(files$shard(ctx$world_size, ctx$rank))
#' }
#' fit <- barrier_train(sc, new_model, batches, workers = 8, exchange = local_steps(20))
#' }
barrier_train <- take_options(
  function(sc, model = NULL, data = NULL, formula = NULL, ..., model_fn = NULL) {
    check_dots_empty(...)
    training <- prepare_training(barrier_train_options)
    settings <- training$settings
    # Levels of text in a table or in files are known only to the workers.
    informs <- settings$verbose > 0 && !inherits(model, "tfdist_fit")
    informs <- informs && is.null(label_values(training$columns))
    levels <- training$columns$levels
    if (informs) {
      inform_levels(levels)
    }
    kept <- keep_builder(model, model_fn)
    result <- run_training(training, pybackend()$barrier_train)
    fit <- make_fit(result, describe_training(training, match.call(), kept))
    if (informs && is.null(levels)) {
      inform_levels(fit$levels)
    }
    record_training(fit)
  },
  barrier_train_options
)

#' Train in a process of its own
#'
#' `submit_training()` hands a training over to a process of its own, and returns a job as soon as
#' it has handed over the model and the rows. You may then restart R, log out of the machine or
#' close RStudio. [attach_job()] returns the job in any other session. On Spark, this needs Spark
#' Connect 4.1, and its URL in the environment variable `SPARK_REMOTE`.
#'
#' @inheritParams barrier_train
#' @param sc Where the workers run, as in [barrier_train()], but not sessions that join.
#' @param folder Folder for the files of all jobs. If it is a URI, sessions on other machines find a
#'   copy there. `NULL` (default): the environment variable `TFDIST_JOBS`, or
#'   `~/.local/state/tfdist/jobs`.
#' @return A job. Its methods are described in [attach_job()].
#' @inheritSection barrier_train Errors
#' @export
#' @examples
#' \dontrun{
#' job <- submit_training("local", model, iris, Species ~ ., epochs = 50)
#' job
#' fit <- job$result()
#' }
submit_training <- take_options(
  function(sc, model = NULL, data = NULL, formula = NULL, ..., model_fn = NULL, folder = NULL) {
    check_dots_empty(...)
    check_string(folder, allow_null = TRUE)
    training <- prepare_training(barrier_train_options)
    kept <- keep_builder(model, model_fn)
    share_address()
    job <- run_training(training, pybackend()$submit_training, folder = jobs_folder(folder))
    new_job(job, describe_training(training, match.call(), kept))
  },
  barrier_train_options
)

# The arguments of a training run, in the frame of its call, checked. `options` are the names of
# those that it has in Python.
prepare_training <- function(options, frame = caller_env()) {
  args <- mget(c("sc", "model", "model_fn", "data", "formula", "validation_data"), envir = frame)
  model <- args$model
  route <- check_sc(args$sc, "sc")
  check_one_model(model, args$model_fn)
  is_fit <- inherits(model, "tfdist_fit")
  check_no_formula(args$formula, is_fit)
  of_columns <- c("label", "features", "weight", "data_options", "validation_data")
  settings <- check_arguments(c("data_options", setdiff(options, of_columns)), frame)
  named <- named_columns(frame)
  if (is.null(named$label) && is_fit) {
    named$label <- scored_label(model, args$data)
  }
  given <- choose_columns(named, args$formula, settings$data_options, args$data)
  settings$data_options <- NULL
  columns <- complete_columns(given, model)
  # A recipe has its own weights, also in a fit whose training continues.
  columns$weight <- columns$weight %||% columns$preparation$weight
  settings <- complete_settings(settings, model)
  settings["seed"] <- list(settings$seed %||% draw_seed(route))
  data <- check_data(args$data, columns, route, arg = "data")
  check_shuffled(data, settings$shuffle)
  if (!is.null(columns$levels)) {
    data <- match_levels(data, columns$levels)
  }
  columns <- narrow_columns(columns, data)
  columns$labels <- describe_labels(data$y)
  validation <- check_data(args$validation_data, columns, route, TRUE, "validation_data")
  check_validation_split(settings$validation_split, data, validation)
  validation <- match_levels(validation, label_levels(data), "validation_data")
  check_has_columns(given, data, validation)
  list(
    route = route,
    model = list(model = model, model_fn = args$model_fn),
    data = data,
    validation = validation,
    columns = columns,
    settings = settings,
    class_weight = class_weight_codes(settings$class_weight, data)
  )
}

# From R's random numbers, if any were drawn or set.seed() was called, so that set.seed() makes a
# training repeatable. Not for sessions that join: they must all have the same seed.
draw_seed <- function(route) {
  if (!is.null(route$sc) && exists(".Random.seed", globalenv(), inherits = FALSE)) {
    sample.int(.Machine$integer.max, 1L)
  }
}

# What R adds to the result of a training: the other arguments of new_fit().
describe_training <- function(training, call, kept) {
  columns <- training$columns
  columns$feature_names <- training$data$feature_names
  columns$encode_of_data <- training$data$encode
  list(columns = columns, settings = training$settings, call = call, kept = kept)
}

make_fit <- function(result, own) do.call(new_fit, c(list(result), own), quote = TRUE)

# `fn` is Python's barrier_train() or another function of the same arguments, and of `...`.
run_training <- function(training, fn, ...) {
  route <- training$route
  model <- training$model
  data <- training$data
  validation <- training$validation
  settings <- replace(training$settings, "class_weight", list(training$class_weight))
  session <- open_session(route)
  runs_r <- !is.null(model$model_fn) || is_rebuilt(model$model)
  runs_r <- runs_r || is_r_function(data) || is_r_function(validation)
  builds <- training$trial_models
  model <- if (!is.null(builds)) {
    announce_tensorflow(NULL, settings$verbose)
    builds(data)
  } else if (is.null(model$model_fn)) {
    announce_tensorflow(model$model, settings$verbose)
    as_sent_model(model$model, settings$seed)
  } else {
    as_r_function(model$model_fn, NULL, identity, arg = "model_fn")
  }
  if (!runs_r && is.null(builds)) {
    check_inputs(model, data$feature_names)
    check_label_levels(model, data$y)
  }
  launcher <- if (runs_r) open_r_workers(route) else session
  settings <- as_python_settings(settings)
  train <- function(rows, validation_rows) {
    columns <- add_label_levels(training$columns, validation, validation_rows)
    options <- c(settings, as_python_columns(columns, data, validation))
    call_python(fn, launcher, model, rows, validation_data = validation_rows, !!!options, ...)
  }
  with_python_data(data, session, code = function(rows) {
    train_on <- function(validation_rows) train(rows, validation_rows)
    with_python_data(validation, session, train_on, "validation_data")
  })
}

# TRUE if the workers must run R for these data.
is_r_function <- function(data) identical(data$kind, "function")

check_one_model <- function(model, model_fn) {
  if (is.null(model_fn)) {
    return(check_model(model))
  }
  if (!is.null(model)) {
    advice <- "Use `model` to send a model, or `model_fn` to have each worker build it."
    abort_input("`model` and `model_fn` cannot be used together.", i = advice)
  }
  expected <- "an R function without arguments"
  check_fits(model_fn, !is.primitive(model_fn) && !is_python(model_fn), expected)
  check_model(model_fn, expected)
}
