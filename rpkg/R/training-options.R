#' Options for reading and storing rows
#'
#' Value for the `data_options` argument of [barrier_train()] and [barrier_evaluate()].
#'
#' @param tensors Data type and shape of the array in each row of a column, for tables and files, as
#'   a named list: `list(image = list("uint8", c(28, 28)))`. Bytes are read as little-endian, and
#'   arrays in row-major order. `list("int32", NA)` allows rows of any length, which are padded with
#'   zeros to the length of the longest, and `list("float32", c(NA, 3))` rows of any number of
#'   vectors of length 3.
#' @param categories Possible values of columns, as a named list: `list(color = c("blue", "red"))`
#'   encodes them as 0, 1, 2, ... Any other value raises an error.
#' @param tfrecord_spec Features of TFRecord files, as a named vector of `"int64"`, `"float32"`,
#'   `"bytes"` or `"string"`, followed by `"[]"` for lists. `NULL` (default): the description that
#'   [write_tfrecords()] writes next to the files or, if there is none, the types in the first
#'   records.
#' @param encode Encoding of feature columns that contain text or factors or have `categories`.
#'   `"one_hot"`: one number per value, 1 if the row has that value, else 0. `"integer"`: the code
#'   of the value, for an embedding. To choose an encoding for each column, pass a named vector such
#'   as `c(color = "integer", year = "one_hot")`, which may also name columns of whole numbers.
#'   `NULL` (default): text and factors are one-hot encoded, and columns with `categories` become
#'   codes. A text column of a table or files is passed to the model as strings if it is the only
#'   column of an input; so is a character column of a data frame if `model` has a string input for
#'   it. Without `categories`, the values are a factor's levels, or the sorted values in the
#'   training data.
#' @param repartition `FALSE` uses a table's existing partitions (there must be exactly `workers` of
#'   them) and gives each worker one contiguous range of the rows in files. Reading is then faster,
#'   but if the rows are sorted, the workers get different classes.
#' @return An object for [barrier_train()] or [barrier_evaluate()]. Invalid arguments raise an error
#'   of class `tfdist_error_input`.
#' @export
#' @examples
#' data_options(categories = list(color = c("blue", "red")), in_memory = TRUE)
#' data_options(tensors = list(image = list("uint8", c(28, 28))))
data_options <- new_maker("data_options")

# Malformed values are left to Python's checks.
as_python_data_options <- function(fields) {
  fields["tensors"] <- list(lapply(fields$tensors, as_python_tensor))
  categories <- lapply(fields$categories, as_comparable_values)
  fields["categories"] <- list(lapply(categories, as.list))
  fields
}

# NA as the first size: rows of any length.
as_python_tensor <- function(tensor) {
  if (!is.list(tensor) || length(tensor) != 2L) {
    return(tensor)
  }
  list(tensor[[1L]], lapply(tensor[[2L]], function(size) if (!is.na(size)) size))
}

null_if_empty <- function(x) if (length(x)) x

# Values in the type in which Python compares them with a column: there, 3 does not match 3.0.
as_comparable_values <- function(values) {
  if (is.factor(values)) {
    as.character(values)
  } else if (is.double(values) && rlang::is_integerish(values)) {
    as.integer(values)
  } else {
    as.vector(values)
  }
}

has_unique_names <- function(x) {
  length(x) > 0L && rlang::is_named(x) && !anyDuplicated(names(x))
}

#' Let workers leave and join a training run
#'
#' Value for the `workers` argument of [barrier_train()]: training continues without workers that
#' fail or are preempted. A lost worker costs the step that failed: the others share the rest of the
#' epoch's rows. Other workers may join between two epochs, or when a worker is lost.
#' [barrier_train()] describes the exceptions, and what takes the place of a lost worker.
#'
#' @return An object for [barrier_train()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' elastic(4, min = 2, max = 8)
#' \dontrun{
#' fit <- barrier_train(hosts("a:4,b:4"), model, data, workers = elastic(4, min = 2, max = 8))
#' fit$workers_by_epoch
#' }
elastic <- new_maker("elastic")

#' Options for the data exchange between workers
#'
#' Value for the `exchange` argument of [barrier_train()]. `exchange()` averages the gradients in
#' every step, so the result is the same as that of one process that trains on the global batches.
#' `local_steps()` lets each worker take several steps before the weights are averaged (local SGD).
#' This reduces traffic on slow networks, but changes the result. With one worker, these options
#' have no effect.
#'
#' @param scale_lr `"linear"` or `"sqrt"`: multiplies the learning rate by the number of workers or
#'   by its square root, because a step covers the rows of all workers. Or a list with one of these,
#'   `warmup_epochs` and `decay`; see the section on learning rates. The history records the rate of
#'   each epoch's last step as `learning_rate`. `NULL` (default): the optimizer's rate.
#' @inherit elastic return
#' @section Learning rates:
#' With `scale_lr`, the rate of each step is the optimizer's own rate, as compiled or as set by
#' callbacks, multiplied by a factor. With N workers, the factor is N for `"linear"` (Goyal et al.,
#' 2017), and the square root of N for `"sqrt"` (Krizhevsky, 2014), which suits Adam and similar
#' optimizers. The optimizer's variable does not change, so the trained model and every checkpoint
#' contain the unscaled rate. In `list("sqrt", warmup_epochs = 5, decay = c("30" = 0.1))`,
#' * `warmup_epochs` is the number of epochs, possibly fractional, over which the rate rises step by
#'   step from the unscaled to the scaled value;
#' * `decay` has factors by which the rate is multiplied. The name of each factor is the number of
#'   completed epochs after which it applies.
#' @export
#' @examples
#' exchange(compression = "bf16")
#' exchange(loss_over = "global batch")
#' exchange(shard_optimizer = TRUE)
#' exchange(scale_lr = list("sqrt", warmup_epochs = 5, decay = c("30" = 0.1, "60" = 0.01)))
#' local_steps(100, learning_rate = 0.7, momentum = 0.9)
#' \dontrun{
#' barrier_train(sc, model, data, workers = 8, exchange = exchange(transport = "tf"))
#' barrier_train(sc, model, data, workers = 8, exchange = local_steps(100))
#' }
exchange <- new_maker("exchange")

#' @rdname exchange
#' @export
local_steps <- new_maker("local_steps")

#' Train asynchronously on parameter servers
#'
#' Value for the `exchange` argument of [barrier_train()]: training with TensorFlow's
#' `ParameterServerStrategy`. The weights are stored on parameter servers, and each worker takes
#' steps on batches of its own rows without waiting for the others. The result is *not* the same as
#' that of one process, and differs from run to run. An epoch has as many steps as there are batches
#' in all rows; a faster worker takes more of these steps. Training continues without a lost worker,
#' except on Spark and in sessions that join. The `workers` of [barrier_train()] take the steps. The
#' parameter servers are additional processes, as is a chief, which schedules the steps and holds
#' the final model.
#'
#' @inherit elastic return
#' @export
#' @examples
#' parameter_server(servers = 2)
#' \dontrun{
#' fit <- barrier_train(sc, model, data, workers = 4, exchange = parameter_server(servers = 2))
#' }
parameter_server <- new_maker("parameter_server")

#' Save checkpoints, resume training and restart workers
#'
#' `recovery()` returns a value for the `recovery` argument of [barrier_train()]: what happens if
#' training is interrupted. With `uri`, the state of training is saved there. A training run that
#' resumes from it, with `resume = TRUE` or automatically with `restarts`, ends with weights and
#' history that are bit-for-bit identical to those of an uninterrupted run. `load_checkpoint()`
#' returns the saved model.
#'
#' A checkpoint holds the weights, the optimizer's state, the state of each worker's random number
#' generators, callback attributes that are plain data, and the history. It is written in the
#' background, and is either complete or absent. If the newest checkpoint is damaged, the previous
#' one is used. If a worker gets SIGTERM, as happens before a preemption, all workers save one more
#' checkpoint at the same step and exit.
#'
#' To resume, the call must be the same: a different model, different data or different settings
#' raise an error, except that `epochs` may be larger. If training resumes between two epochs,
#' `workers` may also be different.
#'
#' @param ... Must be empty: the arguments that follow must be named.
#' @param model A compiled model with the same structure as the trained one, to load the weights
#'   into. It is required for models that Keras cannot write to a file.
#' @inheritParams model_from_base64
#' @return `recovery()` returns an object for [barrier_train()]; `load_checkpoint()` returns a Keras
#'   model. Invalid arguments raise an error of class `tfdist_error_input`.
#' @export
#' @examples
#' recovery("run-1", every = "10min", keep = 3)
#' \dontrun{
#' saved <- recovery("/shared/run-1", restarts = 3)
#' fit <- barrier_train(sc, model, data, workers = 8, recovery = saved)
#' # If this session itself fails, make the same call with `resume = TRUE`:
#' saved <- recovery("/shared/run-1", resume = TRUE, restarts = 3)
#' fit <- barrier_train(sc, model, data, workers = 8, recovery = saved)
#' model <- load_checkpoint("/shared/run-1")
#' }
recovery <- new_maker("recovery")

#' @rdname recovery
#' @export
load_checkpoint <- function(uri, ..., model = NULL, custom_objects = NULL, safe_mode = TRUE) {
  check_dots_empty(...)
  check_string(uri)
  if (!is.null(model)) {
    check_model_object(model)
  }
  check_custom_objects(custom_objects)
  check_flag(safe_mode)
  call_python(
    pybackend()$load_checkpoint,
    expand_path(uri),
    model = if (!is.null(model)) as_python_model(model),
    custom_objects = custom_objects,
    safe_mode = safe_mode
  )
}

# Python does not expand `~`.
expand_path <- function(uri) if (grepl("://", uri, fixed = TRUE)) uri else path.expand(uri)

#' Resources of each worker
#'
#' Value for the `resources` argument of [barrier_train()] and the other functions that start
#' workers. It has the same meaning with every launcher. A launcher that cannot provide the
#' resources raises an error before training starts. With Spark 4 on a cluster, the tasks that run
#' the workers get these cores and GPUs; other tasks of the session keep theirs.
#'
#' @inherit elastic return
#' @export
#' @examples
#' resources(cpus = 2, memory = "4GB")
#' \dontrun{
#' barrier_train(sc, model, data, workers = 8, resources = resources(cpus = 4, gpus = 1))
#' train_mnist(sc, workers = 3, resources = resources(environment = "this"))
#' }
resources <- new_maker("resources")

#' Options for a model's classes and its file
#'
#' Value for the `model_options` argument of [barrier_train()] and of other calls with a model.
#'
#' @param custom_objects Named list of Python classes and functions that the model needs in addition
#'   to Keras's own. `NULL` (default): none, or those of the fit if the model is a [tfdist_fit].
#' @inherit elastic return
#' @export
#' @examples
#' model_options(uri = "/shared/models/digits.keras")
model_options <- new_maker("model_options")
