#' Train a Keras model on several workers
#'
#' Starts `workers` processes, gives each its share of the rows, and runs the model's own `fit()` in
#' all of them at once. At every step the gradients are averaged between the workers, so that all
#' hold the same weights, those of one process training on batches of `workers * batch_size` rows.
#' The trained model and its history come back to this session.
#'
#' @param sc Where the workers run:
#'   * `"local"`, `"local[N]"` or `NULL`: processes on this machine, without Spark;
#'   * a connection of `sparklyr::spark_connect()`, those of pysparklyr included: tasks of that
#'     Spark application. Its executors need Python with TensorFlow, not R;
#'   * a PySpark `SparkSession`, classic or Connect, that reticulate holds.
#' @param model A compiled Keras model, made through reticulate or the R package keras3, or an R
#'   function without arguments that returns one, which is called in this session (with `seed`, if
#'   given, as the seed of Keras).
#' @param data The rows to train on:
#'   * `list(x, y)` with arrays whose first dimension counts the rows; a third element is a weight
#'     for each row. `x` may be a list of arrays, one per input of the model; a named list goes by
#'     the names of the inputs. Doubles reach Keras as float32, integers as int32. A factor `y`
#'     becomes codes that start at 0;
#'   * a data frame with the column `label`; the other columns, or those that `features` names, are
#'     numeric or logical and make up one matrix;
#'   * a table of sparklyr (`tbl_spark`), or a pipeline of dplyr or a query of SQL that has not been
#'     run yet, which reaches the workers without passing through R. Its columns hold numbers,
#'     arrays of numbers, ML vectors, bytes or text;
#'   * the path or URI (a scheme that Python's fsspec knows) of Parquet or TFRecord files, one file
#'     or a folder of them, which the workers read themselves: a path that all their machines share;
#'   * an R function, called on each worker as `data(ctx)` with the worker's place (see
#'     [barrier_apply()], also for what travels with it and what the machines need), that returns a
#'     `tf.data.Dataset` of local batches `(x, y)` or `(x, y, sample_weight)`. They are used as they
#'     come; endless data need `steps_per_epoch`. TensorFlow calls a generator from threads of its
#'     own, where R cannot run: build it of TensorFlow's own operations;
#'   * a PySpark DataFrame, a Python function or a tuple of numpy arrays, as they are.
#' @param ... Must be empty: the arguments that follow are given by name.
#' @param model_fn In place of `model`: an R function without arguments that builds and compiles the
#'   model in every worker, where its losses and metrics may be R functions, too (the model then
#'   comes back without its compile settings); its layers are Keras's own. It travels as the
#'   function of [barrier_apply()] does, and needs the same on the workers' machines.
#' @param label Name of the label column of a data frame, table or files. Text becomes 0, 1, 2, ...
#'   in sorted order, unless `categories` names its values; the fit keeps them as `levels`.
#' @param features Names of the feature columns, side by side one input of the model; `NULL` takes
#'   all others. A named list makes several inputs, by their names in the model:
#'   `list(left = c("a", "b"), right = "image")`. Of a table or files a text column that is an input
#'   of its own gives strings.
#' @param weight Name of the column with the weight of each row in the loss; `NULL`: all weigh 1.
#' @param tensors How columns of tables and files are read: a named list of type and shape of their
#'   rows, `list(image = list("uint8", c(28, 28)))`. Bytes are little-endian, and arrays of R have
#'   the shape row by row. `list("int32", NA)` lets rows have any length: they are padded with zeros
#'   to the longest.
#' @param categories Named list of the values of columns, which become 0, 1, 2, ...:
#'   `list(color = c("blue", "red"))`. Any other value is an error.
#' @param tfrecord_spec What TFRecord files hold: a vector of `"int64"`, `"float32"`, `"bytes"` or
#'   `"string"`, with `"[]"` behind it for lists, by the features' names. `NULL`: as
#'   [write_tfrecords()] has noted beside the files, or as their first records show.
#' @param repartition `FALSE` keeps the partitions that a table has, of which there must be
#'   `workers`, and gives each worker one stretch of the rows of files: faster to read, but the
#'   workers then differ in their classes where rows are sorted.
#' @param in_memory Whether workers keep their rows in memory. By default these stay on the worker's
#'   disk, and memory does not grow with them.
#' @param model_uri Where the first worker writes the trained model, `.h5` or `.keras`, in place of
#'   sending it through this session: a path that all machines share, or a URI. Needed for models of
#'   a gigabyte. The fit reads it from there.
#' @param workers Number of worker processes.
#' @param epochs Number of passes over the rows.
#' @param batch_size Rows per step in each worker.
#' @param steps_per_epoch Steps that make an epoch; `NULL` takes as many as the rows need.
#' @param validation_data Rows to evaluate the model on after each epoch, in a form that `data` may
#'   have.
#' @param callbacks List of Keras callbacks (Python objects), which run in the workers.
#' @param class_weight Weight in the loss of the rows of each class, as a named vector or list:
#'   `c("0" = 1, "1" = 5)`; the rows of classes that it leaves out weigh 1. Where the label is a
#'   factor, the names may be its levels. For models of one output, and not together with a weight
#'   for each row.
#' @param seed A whole number makes initial weights, shuffling and dropout repeatable; `NULL` draws
#'   one.
#' @param shuffle `TRUE` or `"shard"`: each worker visits its rows in a new order in each epoch.
#'   `"global"`, for arrays, data frames and files: the workers share out a new order of all rows in
#'   each epoch, for which every worker keeps all of them. `FALSE`: rows are visited as they come.
#' @param custom_objects Named list of the Python classes and functions that the model needs besides
#'   Keras's own.
#' @param safe_mode Whether to refuse models that carry Python code (lambda layers).
#' @param transport What the gradients travel by: `"tcp"`, or `"tf"` for TensorFlow's collectives
#'   (NCCL between GPUs).
#' @param compression `"fp16"` or `"bf16"` halves what travels. Rounding errors are kept and sent
#'   later, but the result is no longer that of one process. `NULL` is exact.
#' @param bucket_mb Megabytes of gradients that travel together while the backward pass goes on;
#'   `Inf` sends all at once after it.
#' @param local_steps Steps that each worker takes by itself before the weights are averaged. 1 is
#'   exact; more suit slow networks and change the result (local SGD).
#' @param outer_learning_rate,outer_momentum How the average change is applied after several local
#'   steps. 0.7 and 0.9 give DiLoCo.
#' @param verify_weights Whether to compare the workers' weights after every epoch, not only at the
#'   start and at the end.
#' @param verbose 0: silent; 1: a line for each epoch; 2: more.
#' @param timeout Seconds that workers may take to start and to wait for each other.
#'
#' @return A [tfdist_fit] object.
#'
#' @section Errors:
#' What is wrong with the arguments is an error at once, before Python or a cluster is used. See
#' [tfdist_error] for the classes and what they carry.
#'
#' @seealso [train_mnist()] for a complete first run, [predict.tfdist_fit()], [save_model()];
#'   [barrier_evaluate()] and [barrier_predict()] to use a model on several workers.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' keras <- reticulate::import("keras")
#' new_model <- function() {
#'   input <- keras$Input(reticulate::tuple(4L))
#'   model <- keras$Sequential(list(input, keras$layers$Dense(3L)))
#'   loss <- keras$losses$SparseCategoricalCrossentropy(from_logits = TRUE)
#'   model$compile(optimizer = "adam", loss = loss, metrics = list("accuracy"))
#'   model
#' }
#' fit <- barrier_train("local", new_model, iris, label = "Species", workers = 2, epochs = 3)
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
#'   tensors = list(image = list("uint8", c(28, 28))),
#'   workers = 8
#' )
#'
#' # Batches that a function makes on each worker.
#' batches <- function(ctx) {
#'   tf <- reticulate::import("tensorflow")
#'   files <- tf$data$Dataset$list_files("/data/part-*", shuffle = FALSE)
#'   read_batches(files$shard(ctx$world_size, ctx$rank))
#' }
#' fit <- barrier_train(sc, new_model, batches, workers = 8)
#' }
barrier_train <- function(
  sc,
  model = NULL,
  data = NULL,
  ...,
  model_fn = NULL,
  label = "label",
  features = NULL,
  weight = NULL,
  tensors = NULL,
  categories = NULL,
  tfrecord_spec = NULL,
  repartition = TRUE,
  in_memory = FALSE,
  model_uri = NULL,
  workers = 2L,
  epochs = 1L,
  batch_size = 32L,
  steps_per_epoch = NULL,
  validation_data = NULL,
  callbacks = NULL,
  class_weight = NULL,
  seed = NULL,
  shuffle = TRUE,
  custom_objects = NULL,
  safe_mode = TRUE,
  transport = "tcp",
  compression = NULL,
  bucket_mb = 25,
  local_steps = 1L,
  outer_learning_rate = 1,
  outer_momentum = 0,
  verify_weights = FALSE,
  verbose = 1,
  timeout = 300
) {
  check_named_only(...)
  route <- check_sc(sc)
  check_one_model(model, model_fn)
  choice <- new_choice(
    label,
    features,
    weight,
    tensors,
    categories,
    tfrecord_spec,
    repartition
  )
  settings <- list(
    workers = check_count(workers),
    epochs = check_count(epochs),
    batch_size = check_count(batch_size),
    steps_per_epoch = check_count(steps_per_epoch, allow_null = TRUE),
    callbacks = check_callbacks(callbacks),
    seed = check_count(seed, min = 0L, allow_null = TRUE),
    shuffle = check_shuffle(shuffle),
    in_memory = check_flag(in_memory),
    model_uri = check_model_uri(model_uri),
    custom_objects = check_custom_objects(custom_objects),
    safe_mode = check_flag(safe_mode),
    transport = check_choice(transport, c("tcp", "tf")),
    compression = check_choice(compression, c("fp16", "bf16"), allow_null = TRUE),
    bucket_mb = check_positive(bucket_mb, finite = FALSE),
    local_steps = check_count(local_steps),
    outer_learning_rate = check_positive(outer_learning_rate),
    outer_momentum = check_fraction(outer_momentum),
    verify_weights = check_flag(verify_weights),
    verbose = check_verbose(verbose),
    timeout = check_positive(timeout)
  )
  check_exchange(settings)
  check_class_weight(class_weight)
  data <- check_data(data, choice, route)
  check_shuffled(data, shuffle)
  choice$features <- data$features %||% choice$features
  choice$levels <- label_levels(data)
  validation <- check_data(validation_data, choice, route, allow_null = TRUE)
  check_levels(data, validation)
  check_columns_there(choice, data, validation)
  settings$class_weight <- weights_of_codes(class_weight, data)

  call <- rlang::current_env()
  result <- run_training(route, model, model_fn, data, validation, choice, settings, call)
  fit <- new_fit(result, choice, custom_objects, safe_mode)
  if (is.null(choice$categories[[label]])) {
    tell_levels(fit$levels)
  }
  fit
}

run_training <- function(route, model, model_fn, data, validation, choice, settings, call) {
  backend <- pybackend(call)
  session <- open_session(route, call)
  if (is.null(model_fn)) {
    model <- as_python_model(model, call, settings$seed)
  } else {
    model <- as_r_function(model_fn, NULL, identity, arg = "model_fn", call = call)
  }
  runs_r <- !is.null(model_fn) || calls_r(data) || calls_r(validation)
  workers <- if (runs_r) open_r_workers(route, call) else session
  train <- function(rows, validation_rows) {
    choice <- with_label_levels(choice, choice$levels, validation, validation_rows)
    settings <- c(settings, sent_choice(choice, data, validation))
    settings <- lapply(settings, function(value) if (length(value)) value)
    arguments <- list(
      backend$barrier_train,
      workers,
      model,
      rows,
      validation_data = validation_rows,
      call = call
    )
    do.call(call_python, c(arguments, settings))
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
calls_r <- function(data) identical(data$kind, "function")

check_one_model <- function(model, model_fn, call = caller_env()) {
  if (is.null(model_fn)) {
    return(check_model(model, arg = "model", call = call))
  }
  if (!is.null(model)) {
    abort_input(
      c(
        "Both `model` and `model_fn` are given.",
        i = "Give `model` to send a model, or `model_fn` to have each worker build it."
      ),
      call = call
    )
  }
  if (is.primitive(model_fn) || is_python(model_fn)) {
    abort_expected(model_fn, "an R function without arguments", FALSE, "model_fn", call)
  }
  check_model(model_fn, "an R function without arguments", arg = "model_fn", call = call)
}

check_named_only <- function(..., call = caller_env()) {
  rlang::check_dots_empty(call = call, error = function(error) {
    abort_input(conditionMessage(error), call = call)
  })
}

# What is settled between the workers, where one argument excludes another.
check_exchange <- function(settings, call = caller_env()) {
  if (settings$transport != "tcp") {
    if (settings$local_steps > 1L) {
      abort_input("`local_steps` above 1 needs `transport = \"tcp\"`.", call = call)
    }
    if (!is.null(settings$compression)) {
      abort_input("`compression` needs `transport = \"tcp\"`.", call = call)
    }
  }
  has_outer <- settings$outer_learning_rate != 1 || settings$outer_momentum != 0
  if (settings$local_steps == 1L && has_outer) {
    abort_input(
      c(
        "`outer_learning_rate` and `outer_momentum` act between local steps, and there are none.",
        i = "Set `local_steps` to 2 or more."
      ),
      call = call
    )
  }
}

check_shuffled <- function(data, shuffle, call = caller_env()) {
  if (data$kind == "function" && identical(shuffle, "global")) {
    abort_input(
      "`shuffle = \"global\"` cannot reorder what the function `data` returns.",
      call = call
    )
  }
  if (data$kind == "table" && identical(shuffle, "global")) {
    abort_input(
      c(
        "`shuffle = \"global\"` needs all rows in every worker, and `data` is a Spark table.",
        i = "Use `shuffle = TRUE`: a table's rows are spread over the workers at random anyway."
      ),
      call = call
    )
  }
}

#' Train a first network on MNIST
#'
#' Trains a small convolutional network on the handwritten digits of [mnist()] and evaluates it on
#' the test images. Nothing has to be prepared: without a network connection it uses the images that
#' come with the package.
#'
#' @inheritParams barrier_train
#' @param path,limit See [mnist()].
#'
#' @return A [tfdist_fit] object whose `metrics` are `test_loss` and `test_accuracy`.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' fit <- train_mnist("local", workers = 2, epochs = 1, limit = 640)
#' fit$metrics
train_mnist <- function(
  sc = "local",
  workers = 3,
  ...,
  epochs = 3,
  batch_size = 64,
  path = NULL,
  limit = NULL,
  seed = 1,
  verbose = 1,
  timeout = 300
) {
  check_named_only(...)
  route <- check_sc(sc)
  workers <- check_count(workers)
  epochs <- check_count(epochs)
  batch_size <- check_count(batch_size)
  check_mnist_path(path)
  limit <- check_count(limit, allow_null = TRUE)
  seed <- check_count(seed, min = 0L, allow_null = TRUE)
  verbose <- check_verbose(verbose)
  timeout <- check_positive(timeout)

  backend <- pybackend()
  result <- call_python(
    backend$train_mnist,
    open_session(route),
    workers = workers,
    epochs = epochs,
    batch_size = batch_size,
    path = path,
    limit = limit,
    seed = seed,
    verbose = verbose,
    timeout = timeout
  )
  new_fit(result, list(levels = as.character(0:9)))
}
