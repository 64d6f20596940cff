#' Result of a training run
#'
#' [barrier_train()] and [train_mnist()] return an object of class `tfdist_fit`. It contains the
#' trained model as text, so you can save it with `saveRDS()` and use it in a different session.
#'
#' @details
#' Access the elements with `$`:
#' * `model`: the trained Keras model, a Python object, decoded when you first use it;
#' * `history`: a named list with one number per epoch for each metric. A metric with several values
#'   has an entry for each of them: `f1_score_1`, `f1_score_2`, ...;
#' * `workers`: a data frame with a row for each worker: `rank`, `host`, `pid`, `rows`, `steps`,
#'   `seconds`, `waited` (how many of these seconds it waited for other workers; `NA` if unknown),
#'   `ok`;
#' * `straggler`: the worker that the others waited for, as a list of its `rank` and the `seconds`
#'   that they waited; `NULL` if there is none;
#' * `audit`: comparison of some steps with the same steps in one process, as a list: the number of
#'   `steps`, their `rows`, the largest relative difference in `weights` and `metrics`, and in
#'   gradients that are `zeros` except for rounding; how many steps were `undecided`, the reasons
#'   (`skipped`), and what was not compared (`left_out`). See [exchange()];
#' * `workers_by_epoch`: number of workers at the end of each epoch;
#' * `generations`: with [elastic()], a data frame with a row for each worker group: the `epoch` and
#'   the `step` with which it began; and, as text, the numbers of its `workers` in rank order, of
#'   the workers that `joined`, and of those that `left`, with the reasons;
#' * `restarts`: a data frame with a row for each restart of the workers: `time`, the error that
#'   reported the lost worker (`lost`), and the `checkpoint` from which training resumed (`NA`: from
#'   the beginning);
#' * `timeline`: what the workers did and when, a data frame with a row for each change: `rank`,
#'   `host`, `time` (on the worker's clock), `state` (such as `"started"`) and `reason`. It includes
#'   lost workers;
#' * `tensorboard`: folder or URI of the TensorBoard event files; `NULL` if there is none;
#' * `record`: everything that was recorded, including the steps of each worker, as JSON text for
#'   [report()];
#' * `metrics`: named list of results on other data, such as `test_accuracy`;
#' * `epochs`, `seconds` (duration of the whole call), `seed`;
#' * `parts`: seconds of the parts of the call, in order: `prepare` (the arguments are checked, the
#'   model and the rows encoded), `start` (the workers start, and receive the model and the rows),
#'   `epochs` (from the beginning of the first epoch to the end of the last one, with all restarts)
#'   and `finish` (the model is saved, returned and checked);
#' * `settings`: the training arguments that are plain values, as a list; `call`: the arguments that
#'   refer to data and columns, for [update()][update.tfdist_fit];
#' * `features`, `levels`: the feature columns (for a model with several inputs, a list named after
#'   the inputs) and the levels of the label, if `data` had them;
#' * `label`, `tensors`: these arguments, as used in training;
#' * `categories`, `encode`: the values of each encoded column, in the order of their codes, and its
#'   encoding;
#' * `feature_names`: names of the columns that are passed to the model, in order; names from a
#'   one-hot column have the form `column_level`;
#' * `formula`, `preparation`: the formula, and, for a recipe or a formula that transforms columns,
#'   the steps to apply to new rows;
#' * `model_base64`, `model_format`, `model_sha256`: the encoded model. If [model_options()] has a
#'   `uri`, `model_base64` is empty;
#' * `model_fn`: for a model with parts that are R functions or classes, a copy of the function that
#'   builds it. `model_base64` then contains only the weights and the optimizer's state
#'   (`"weights.h5"`). When you use `model`, the function is called and this state is loaded into
#'   the model that it returns, even in a different session.
#'
#' Any other name raises an error.
#'
#' You can pass a fit instead of a model to [barrier_train()], which continues its training, and to
#' [barrier_evaluate()], [barrier_predict()], [write_model()], [deploy_model()] and [ml_keras()].
#'
#' @param x,object A `tfdist_fit`.
#' @param ... Must be empty.
#' @seealso [predict.tfdist_fit()], [evaluate.tfdist_fit()], [update.tfdist_fit()],
#'   [fitted.tfdist_fit()], [tidy.tfdist_fit], [export_fit].
#' @return `summary()` returns a list of class `summary.tfdist_fit` with everything that it prints.
#'   Its `history` has one row per epoch and one column per metric; other elements are `workers` and
#'   `audit`. `print()` returns its argument, invisibly. `as.data.frame()` returns one row per epoch
#'   and metric with the columns `epoch`, `metric`, `value` and `data` (`"training"` or
#'   `"validation"`). `plot()` and `autoplot()` return the ggplot; `plot()` returns its argument if
#'   base graphics drew the plot.
#' @name tfdist_fit
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' fit <- train_mnist("local", workers = 1, epochs = 2, limit = 640, verbose = 0)
#' summary(fit)
#' as.data.frame(fit)
#' plot(fit)
NULL

# `columns` is a column_spec(), with the `levels` of the label if R knows them; `kept` is the result
# of keep_builder().
new_fit <- function(result, columns = list(), settings = list(), call = NULL, kept = NULL) {
  fields <- result$to_dict()
  # The decoded model is stored in an environment, so that all copies of the fit share it.
  decoded <- new.env(parent = emptyenv())
  decoded$result <- result
  # Any other model is read from its file.
  kept <- if (identical(fields$model_format, "weights.h5")) kept
  structure(
    list(
      history = plain_history(fields$history),
      workers = worker_frame(fields$workers),
      straggler = plain_straggler(fields$straggler),
      audit = plain_audit(fields$audit),
      workers_by_epoch = as.integer(unlist(fields$workers_by_epoch)),
      generations = generation_frame(fields$generations),
      restarts = restart_frame(fields$restarts),
      timeline = timeline_frame(fields$timeline),
      tensorboard = fields$tensorboard,
      record = if (is_python(result)) result$record,
      metrics = fields$metrics,
      epochs = fields$epochs,
      numbered = number_epochs(fields$epochs_of),
      seconds = fields$seconds,
      parts = unlist(fields$parts),
      seed = fields$seed,
      settings = plain_settings(settings),
      call = plain_call(call),
      features = columns$features %||% fields$features,
      levels = columns$levels %||% plain_levels(fields$levels),
      label = columns$label,
      labels = columns$labels,
      tensors = columns$tensors,
      # Python found the values of columns in tables and files.
      categories = null_if_empty(utils::modifyList(
        lapply(fields$categories, unlist),
        as.list(columns$categories)
      )),
      encode = null_if_empty(as.list(columns$encode_of_data %||% fields$encode)),
      feature_names = columns$feature_names %||% plain_names(fields$feature_names),
      formula = columns$formula,
      preparation = columns$preparation,
      model_base64 = fields$model_base64,
      model_format = fields$model_format,
      model_sha256 = fields$model_sha256,
      model_uri = fields$model_uri,
      safe_mode = settings$model_options$safe_mode %||% TRUE,
      custom_objects = settings$model_options$custom_objects,
      model_fn = kept$model_fn,
      rebuilding = if (!is.null(kept)) {
        c(kept["packages"], pybackend()$bridge$describe_weights(result))
      },
      decoded = decoded
    ),
    class = "tfdist_fit"
  )
}

generation_frame <- function(generations) {
  listed <- function(numbers) paste(unlist(numbers), collapse = ", ")
  reasons <- function(left) paste0(names(left), ": ", unlist(left), recycle0 = TRUE)
  data.frame(
    epoch = vapply(generations, function(generation) as.integer(generation$epoch), 0L),
    step = vapply(generations, function(generation) as.integer(generation$step %||% 1L), 0L),
    workers = vapply(generations, function(generation) listed(generation$workers), ""),
    joined = vapply(generations, function(generation) listed(generation$joined), ""),
    left = vapply(generations, function(generation) listed(reasons(generation$left)), "")
  )
}

restart_frame <- function(restarts) {
  frame_of(restarts, list(time = no_time, lost = NA_character_, checkpoint = NA_character_))
}

# A data frame from Python's records. `absent` has the values of absent fields, by column.
frame_of <- function(records, absent) {
  column <- function(none, name) {
    values <- vapply(records, function(one) one[[name]] %||% none, none)
    if (inherits(none, "POSIXct")) .POSIXct(values) else values
  }
  as.data.frame(Map(column, absent, names(absent)))
}

no_time <- .POSIXct(NA_real_)

timeline_frame <- function(timeline) {
  rows <- frame_of(timeline, list(rank = 0, host = "", time = no_time, state = "", reason = ""))
  rows$rank <- as.integer(rows$rank)
  rows
}

plain_audit <- function(audit) {
  if (!is.null(audit)) {
    for (name in c("skipped", "left_out", "differences")) {
      audit[[name]] <- as.character(unlist(audit[[name]]))
    }
    audit
  }
}

plain_straggler <- function(straggler) {
  if (!is.null(straggler)) list(rank = straggler[[1L]], seconds = straggler[[2L]])
}

# Strings or numbers; a list if Python has both.
plain_levels <- function(levels) {
  if (!is.null(levels)) vapply(levels, as.character, "", USE.NAMES = FALSE)
}

plain_names <- function(names) {
  if (is.null(names(names))) unlist(names) else lapply(names, unlist)
}

# A metric of several values, such as an F1 score for each class, becomes several metrics.
plain_history <- function(history) {
  plain <- lapply(names(history), function(name) {
    values <- do.call(rbind, lapply(history[[name]], unlist))
    numbers <- seq_len(ncol(values))
    columns <- lapply(numbers, function(number) as.double(values[, number]))
    rlang::set_names(columns, if (length(numbers) == 1L) name else paste0(name, "_", numbers))
  })
  do.call(c, c(list(list()), plain))
}

# Epochs with metrics of the training, and of the validation, which may not run in all epochs.
number_epochs <- function(epochs_of) {
  is_validation <- startsWith(as.character(names(epochs_of)), "val_")
  first <- function(found) if (length(found)) as.integer(unlist(found[[1L]]))
  list(training = first(epochs_of[!is_validation]), validation = first(epochs_of[is_validation]))
}

# The epochs of each metric in the history, as a list.
epochs_of <- function(fit) {
  in_validation <- startsWith(as.character(names(fit$history)), "val_")
  number <- function(values, data) fit$numbered[[data]] %||% seq_along(values)
  Map(number, fit$history, ifelse(in_validation, "validation", "training"))
}

worker_frame <- function(reports) {
  fields <- c("rank", "host", "pid", "rows", "steps", "seconds", "waited", "ok")
  columns <- lapply(fields, function(field) {
    unlist(lapply(reports, function(report) report[[field]] %||% NA))
  })
  as.data.frame(rlang::set_names(columns, fields))
}

#' @export
`$.tfdist_fit` <- function(x, name) {
  fit_element(x, name)
}

#' @export
`[[.tfdist_fit` <- function(x, i, ...) {
  # Positions are those of names().
  fit_element(x, if (is.character(i)) i else names(x)[[i]])
}

fit_element <- function(fit, name) {
  if (name == "model") {
    return(fit_model(fit))
  }
  if (!name %in% names(unclass(fit))) {
    abort_no_element(name, names(fit))
  }
  .subset2(fit, name)
}

#' @export
names.tfdist_fit <- function(x) {
  c("model", setdiff(names(unclass(x)), c("numbered", "decoded", "rebuilding", "labels")))
}

#' @export
length.tfdist_fit <- function(x) length(names(x))

# Without the model, which needs Python: lapply() calls this.
#' @export
as.list.tfdist_fit <- function(x, ...) {
  unclass(x)[setdiff(names(x), "model")]
}

# With the names above, not those of the list.
#' @exportS3Method utils::str
str.tfdist_fit <- function(object, ...) {
  utils::str(as.list(object), ...)
}

abort_no_element <- function(name, known, class = "tfdist_fit") {
  advice <- name_near(name, known) %||%
    sprintf("Its elements are %s.", list_names(known, length(known)))
  abort_input(sprintf("A %s has no element \"%s\".", class, name), i = advice)
}

fit_model <- function(fit) {
  decoded <- .subset2(fit, "decoded")
  # A fit read by readRDS() has a pointer from the session that wrote it.
  if (is.null(decoded$model) || reticulate::py_is_null_xptr(decoded$model)) {
    decoded$model <- decode_fit(fit)
  }
  decoded$model
}

living_objects <- function(objects) {
  is_dead <- function(object) is_python(object) && reticulate::py_is_null_xptr(object)
  if (is_python(objects)) {
    return(if (!is_dead(objects)) objects)
  }
  objects <- objects[!vapply(objects, is_dead, NA)]
  if (length(objects)) objects
}

# A row per epoch, with NA if an epoch has no value of a metric.
wide_history <- function(fit) {
  numbers <- epochs_of(fit)
  epoch <- sort(unique(unlist(numbers, use.names = FALSE)))
  columns <- Map(function(values, own) values[match(epoch, own)], fit$history, numbers)
  data.frame(epoch = epoch, columns, check.names = FALSE)
}

#' @rdname tfdist_fit
#' @param row.names,optional Not used; required by the generic.
#' @export
as.data.frame.tfdist_fit <- function(x, row.names = NULL, optional = FALSE, ...) {
  # nolint
  columns <- as.character(names(x$history))
  in_validation <- startsWith(columns, "val_")
  metric <- sub("^val_", "", columns)
  epochs <- lengths(x$history, use.names = FALSE)
  numbers <- unlist(epochs_of(x), use.names = FALSE)
  data <- ifelse(in_validation, "validation", "training")
  data.frame(
    epoch = as.integer(numbers),
    metric = factor(rep(metric, epochs), levels = unique(metric)),
    value = as.double(unlist(x$history, use.names = FALSE)),
    data = factor(rep(data, epochs), levels = c("training", "validation"))
  )
}
