#' Train a model many times at once
#'
#' Trains a model once for each combination of arguments, many at once, and compares the results.
#' Each trial is a training run as by [barrier_train()], with equal results. On this machine, the
#' rows are encoded and written once for all trials, and later trials start within milliseconds.
#'
#' A trial that fails is a row with its error, and the others continue. If you interrupt the call,
#' all trials end.
#'
#' @inheritParams barrier_train
#' @param sc Where the workers run, as in [barrier_train()], but not sessions that join.
#' @param model An R function that returns a compiled Keras model. Its arguments are the names in
#'   `grid`. It is called in this session, once for each trial.
#' @param model_fn Instead of `model`: an R function with such arguments that builds and compiles
#'   the model on every worker, as in [barrier_train()]. Not supported with sparklyr, which runs R
#'   on its workers for one training run at a time.
#' @param grid What to try: a data frame, such as the result of `expand.grid()`, with one trial per
#'   row; a named list of vectors, for all combinations of their values; or a list with a named list
#'   for each trial. The names are arguments of the function, or `batch_size`, `epochs`, `exchange`,
#'   `seed` or `steps_per_epoch`.
#' @param workers_per_trial Number of workers of each trial.
#' @param parallelism Number of trials that run at once. `NULL` (default): as many as there are free
#'   cores and GPUs on this machine, or slots on the cluster.
#' @param metric Metric by which trials are compared, after the last epoch. `NULL` (default):
#'   `"val_loss"`, or `"loss"` if there is no validation data.
#' @param mode `"min"` or `"max"`: which values of the metric are better. `NULL` (default): `"max"`
#'   if its name ends with accuracy, acc, auc, precision, recall, f1_score, r2_score or iou, else
#'   `"min"`.
#' @param prune Rule that stops trials whose metric is worse than that of others after the same
#'   epoch: `"median"`, `"halving"`, or a list of one of these and its settings; see the section on
#'   pruning. Which trials it stops depends on the order in which they end their epochs. `NULL`
#'   (default): all trials run all epochs.
#' @param on_trial Function of one argument that is called in this session when a trial ends. The
#'   argument is a list with the elements `number`, `arguments`, `status`, `metrics`,
#'   `trained_epochs`, `seconds`, `seed` and `error`. `NULL` (default): no function is called.
#' @param callbacks As in [barrier_train()]; every trial has its own copies. An [observer()] sees
#'   all trials.
#' @param seed Seed of every trial. `NULL` (default): drawn at random, using R's random number
#'   generator if `set.seed()` was called.
#' @param resources [resources()] of each worker. `NULL` (default): all trials that run at once on
#'   this machine divide its cores and GPUs.
#' @param recovery As in [barrier_train()], for each trial, but without a folder.
#' @param model_options As in [barrier_train()], but without a `uri`.
#' @param verbose 0 shows nothing, 1 a line for each trial, and 2 also a line for each epoch of a
#'   trial.
#' @return A data frame of class `tfdist_trials` with a row for each trial: `trial` (its number),
#'   the arguments, `status` (`"completed"`, `"pruned"` or `"failed"`), the metrics of the last
#'   epoch, `trained_epochs`, `seconds`, `seed` and `error`. A metric with the name of an argument
#'   becomes `metric.<name>`. `best()` returns the fits, whose models are on this machine's disk, in
#'   a temporary file without a name.
#' @section Pruning:
#' `"median"` stops a trial whose best value so far is worse than the median of the best values that
#' the other trials had after the same epoch (Golovin et al., 2017). Its settings are
#' `warmup_epochs`, the number of epochs that every trial runs (default 1), and `warmup_trials`, the
#' number of other trials that must have reached the epoch (4): `list("median", warmup_epochs = 2)`.
#'
#' `"halving"` stops all but the best trials after `first` epochs (default 1), after `factor` times
#' as many (3), and so on. At each of these epochs, a trial continues if it is among the best
#' `1 / factor` of the trials that have reached the epoch so far. No trial waits for others (ASHA,
#' Li et al., 2020).
#' @seealso [best()], [bench_scale()].
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && requireNamespace("keras3")
#' library(keras3)
#' new_model <- function(units, rate = 0.01) {
#'   keras_model_sequential(input_shape = 4) |>
#'     layer_dense(units, activation = "relu") |>
#'     layer_dense(3, activation = "softmax") |>
#'     compile(optimizer_adam(rate), "sparse_categorical_crossentropy", metrics = "accuracy")
#' }
#' rows <- iris[sample(nrow(iris)), ]
#' trials <- train_many(
#'   "local",
#'   new_model,
#'   rows,
#'   Species ~ .,
#'   grid = expand.grid(units = c(4, 16), rate = c(0.1, 0.01)),
#'   validation_split = 0.2,
#'   epochs = 3
#' )
#' trials
#' fit <- best(trials)
train_many <- take_options(
  function(
    sc,
    model = NULL,
    data = NULL,
    formula = NULL,
    ...,
    grid,
    model_fn = NULL,
    workers_per_trial = 1,
    parallelism = NULL,
    metric = NULL,
    mode = NULL,
    prune = NULL,
    on_trial = NULL
  ) {
    check_dots_empty(...)
    build <- check_trial_model(model, model_fn)
    is_sent <- !is.null(model_fn)
    search <- list(
      grid = check_grid(grid),
      metric = check_string(metric, allow_null = TRUE),
      mode = mode,
      on_trial = as_python_noting(on_trial)
    )
    search <- c(search, check_arguments(c("workers_per_trial", "parallelism")))
    # Each trial has a model of its own.
    model <- if (!is_sent) function() NULL
    model_fn <- if (is_sent) function() NULL
    training <- prepare_training(train_many_options)
    training$trial_models <- function(data) trial_models(build, is_sent, data)
    check_values(list(prune = prune))
    search["prune"] <- list(as_python_pruning(prune))
    result <- run_training(training, pybackend()$train_many, !!!search)
    own <- describe_training(training, match.call(), if (is_sent) build)
    new_trials(result, c(list(result = result), own))
  },
  train_many_options
)

as_python_pruning <- function(prune) {
  classes <- c(median = "MedianPruning", halving = "SuccessiveHalving")
  rule <- if (rlang::is_bare_list(prune)) prune else list(prune)
  if (!length(rule) || !rlang::is_string(rule[[1L]], names(classes))) {
    return(prune)
  }
  as_python_rule(rule[-1L], classes[[rule[[1L]]]])
}

check_trial_model <- function(model, model_fn) {
  if (is.null(model) == is.null(model_fn)) {
    abort_input("Pass either `model` or `model_fn`, a function that builds the model.")
  }
  arg <- if (is.null(model)) "model_fn" else "model"
  f <- model %||% model_fn
  fits <- is.function(f) && !is.primitive(f) && !is_python(f)
  check_fits(f, fits, "an R function whose arguments are the names in `grid`", FALSE, arg)
}

# A list of rows, or a list of lists of values, for Python.
check_grid <- function(grid) {
  expected <- "a data frame, a named list of vectors, or a list of named lists"
  check_fits(grid, is.list(grid) && length(grid) > 0L, expected, FALSE, "grid")
  as_values <- function(values) {
    values <- if (is.factor(values)) as.character(values) else values
    lapply(unname(as.list(values)), as_python_setting)
  }
  if (is.data.frame(grid)) {
    columns <- lapply(grid, as_values)
    return(lapply(seq_len(nrow(grid)), function(row) lapply(columns, function(of) of[[row]])))
  }
  if (rlang::is_named(grid)) {
    return(lapply(grid, as_values))
  }
  is_row <- vapply(grid, function(row) is.list(row) && (rlang::is_named(row) || !length(row)), NA)
  check_fits(grid, all(is_row), expected, FALSE, "grid")
  lapply(grid, function(row) lapply(row, as_python_setting))
}

# The object for Python that builds the model of a trial: in this session, or as a function that is
# sent to the workers.
trial_models <- function(f, is_sent, data) {
  force(f)
  build <- function(arguments, seed) {
    if (is_sent) {
      return(as_r_function(f, NULL, identity, extra = arguments, arg = "model_fn"))
    }
    built <- as_python_model(function() do.call(f, arguments), seed)
    check_inputs(built, data$feature_names)
    check_label_levels(built, data$y)
    built
  }
  building <- function(arguments, seed) within_python(build(as.list(arguments), seed))
  names <- names(formals(args(f)))
  known <- as.list(setdiff(names, "..."))
  needed <- as.list(required_arguments(f))
  pybackend()$bridge$model_function(building, known, needed, "..." %in% names)
}

as_python_noting <- function(f) {
  fits <- is.function(f) && !is_python(f)
  check_fits(f, fits, "an R function of a trial", TRUE, "on_trial")
  if (!is.null(f)) {
    function(trial) {
      within_python(f(pybackend()$bridge$describe_trial(trial)))
      NULL
    }
  }
}

new_trials <- function(result, run) {
  found <- call_bridge("describe_trials", result)
  names <- names(found$records[[1L]])
  columns <- lapply(names, function(name) {
    values <- lapply(found$records, function(record) record[[name]] %||% NA)
    if (all(lengths(values) == 1L)) unlist(values) else I(values)
  })
  structure(
    as.data.frame(rlang::set_names(columns, names), optional = TRUE),
    class = c("tfdist_trials", "data.frame"),
    search = found[c("arguments", "metric", "mode", "parallelism", "seconds")],
    run = list2env(run, parent = emptyenv())
  )
}

#' Get the fit of the best trial
#'
#' @param x The result of [train_many()].
#' @param trial Number of a trial. `NULL` (default): the completed trial with the best value of the
#'   metric in its last epoch.
#' @param ... Must be empty.
#' @param metric Name of the metric. `NULL` (default): that of the search.
#' @param mode `"min"` or `"max"`: which values are better. `NULL` (default): that of the search, or
#'   for another metric, as in [train_many()].
#' @return A [tfdist_fit]. The models of the trials are on this machine's disk, and end with this
#'   session: call `best()` before you save the result.
#' @seealso [train_many()]
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && requireNamespace("keras3")
#' library(keras3)
#' new_model <- function(units) {
#'   keras_model_sequential(input_shape = 4) |>
#'     layer_dense(units, activation = "relu") |>
#'     layer_dense(3, activation = "softmax") |>
#'     compile("adam", "sparse_categorical_crossentropy", metrics = "accuracy")
#' }
#' trials <- train_many("local", new_model, iris, Species ~ ., grid = list(units = c(4, 8)))
#' fit <- best(trials)
#' predict(fit, iris[1:2, ])
#' best(trials, metric = "accuracy")
#' best(trials, 2)
best <- function(x, trial = NULL, ..., metric = NULL, mode = NULL) UseMethod("best")

#' @export
best.tfdist_trials <- function(x, trial = NULL, ..., metric = NULL, mode = NULL) {
  check_dots_empty(...)
  trial <- check_count(trial, allow_null = TRUE)
  metric <- check_string(metric, allow_null = TRUE)
  if (!is.null(trial) && !is.null(c(metric, mode))) {
    abort_input("Pass either the number of a `trial`, or `metric` and `mode`.")
  }
  run <- attr(x, "run")
  if (is.null(run) || reticulate::py_is_null_xptr(run$result)) {
    abort_input(
      "The models of these trials do not exist any more.",
      i = "They end with the session that trained them, and a part of the table has none."
    )
  }
  found <- call_bridge("find_trial", run$result, trial, metric, mode)
  kept <- if (!is.null(run$kept)) {
    build <- run$kept
    arguments <- found$arguments
    keep_builder(NULL, function() do.call(build, arguments))
  }
  settings <- run$settings
  tried <- intersect(names(found$arguments), names(settings))
  settings[tried] <- found$arguments[tried]
  own <- list(columns = run$columns, settings = settings, call = run$call, kept = kept)
  make_fit(found$result, own)
}

#' @export
print.tfdist_trials <- function(x, ...) {
  search <- attr(x, "search")
  needed <- c("trial", "status", "error")
  if (is.null(search) || !all(needed %in% names(x)) || !nrow(x)) {
    return(NextMethod())
  }
  counts <- table(factor(x$status, levels = unique(x$status)))
  counts <- paste(counts, names(counts), collapse = ", ")
  title <- "<tfdist_trials> %s (%s), %d at once, %.1f s\n"
  trials <- format_count(nrow(x), "trial")
  cat(sprintf(title, trials, counts, search$parallelism, search$seconds))
  shown <- as.data.frame(x)
  is_setting <- names(shown) %in% search$arguments & vapply(shown, is.atomic, NA)
  shown[is_setting] <- lapply(shown[is_setting], function(values) {
    ifelse(is.na(values), "", vapply(values, format, "", digits = 15L))
  })
  is_number <- vapply(shown, is.double, NA)
  shown[is_number] <- lapply(shown[is_number], function(values) {
    is_whole <- all(is.na(values) | values == round(values))
    if (is_whole) format(values) else ifelse(is.na(values), "", show_loss(values))
  })
  shown$error <- if (!all(is.na(x$error))) shorten_each(ifelse(is.na(x$error), "", x$error))
  print(shown, row.names = FALSE)
  invisible(x)
}

#' @export
as.data.frame.tfdist_trials <- function(x, ...) {
  class(x) <- setdiff(class(x), "tfdist_trials")
  attr(x, "search") <- attr(x, "run") <- NULL
  x
}
