#' Evaluate a model, or predict with it, on several workers
#'
#' `barrier_evaluate()` shares the rows out over `workers` processes and returns the figures that
#' one process would find for all of them: a metric such as the AUC is that of all rows.
#' `barrier_predict()` returns the model's answers in the order of the rows.
#'
#' @inheritParams barrier_train
#' @param model A [tfdist_fit], a Keras model, or an R function without arguments that returns one.
#'   To be evaluated it must be compiled.
#' @param data The rows to evaluate the model on, in a form that [barrier_train()] takes. Where
#'   `model` is a fit, a factor label must have the levels of the training.
#' @param x The rows to predict for: an array whose first dimension counts the rows, a list of
#'   arrays for a model of several inputs, or a data frame.
#' @param label Name of the label column of a data frame, table or files. Text needs the levels of a
#'   fit, or `categories`.
#' @param features Names of the feature columns, as in [barrier_train()]; `NULL` takes those of the
#'   fit, or else all but those named otherwise.
#' @param tensors,categories As in [barrier_train()]; `NULL` takes those of the fit.
#' @param custom_objects Named list of the Python classes and functions that the model needs besides
#'   Keras's own; `NULL` takes those of the fit.
#' @param verbose 0 and 1: silent; 2: what the workers print.
#'
#' @return
#' * `barrier_evaluate()`: a named vector with the `loss` and each metric; a list where a metric has
#'   several values.
#' * `barrier_predict()`: what [predict.tfdist_fit()] returns. An array with a row for each row of
#'   `x`, whose columns carry the levels of the label where `model` is a fit that has them; a list
#'   of arrays for a model of several outputs.
#'
#' @inheritSection barrier_train Errors
#'
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' digits <- mnist(limit = 640)
#' fit <- train_mnist("local", workers = 2, epochs = 1, limit = 640, verbose = 0)
#' x <- digits$x_test / 255
#' barrier_evaluate("local", fit, list(x, digits$y_test), workers = 2)
#' scores <- barrier_predict("local", fit, x, workers = 2)
#' table(guess = max.col(scores) - 1, digit = digits$y_test)
barrier_evaluate <- function(
  sc,
  model,
  data,
  ...,
  label = "label",
  features = NULL,
  weight = NULL,
  tensors = NULL,
  categories = NULL,
  tfrecord_spec = NULL,
  repartition = TRUE,
  workers = 2L,
  batch_size = 32L,
  custom_objects = NULL,
  safe_mode = TRUE,
  verbose = 1,
  timeout = 300
) {
  check_named_only(...)
  route <- check_sc(sc)
  check_scored_model(model, "a compiled Keras model")
  choice <- new_choice(
    label,
    features,
    weight,
    tensors,
    categories,
    tfrecord_spec,
    repartition
  )
  settings <- scoring_settings(
    model,
    workers,
    batch_size,
    custom_objects,
    safe_mode,
    verbose,
    timeout
  )
  given <- choice
  choice <- choice_of_fit(given, model)
  data <- check_data(data, choice, route)
  check_columns_there(given, data)
  levels <- check_levels_of_fit(data, choice$levels)
  choice$features <- data$features %||% choice$features

  call <- rlang::current_env()
  backend <- pybackend()
  session <- open_session(route)
  workers <- if (calls_r(data)) open_r_workers(route) else session
  score <- function(rows) {
    choice <- with_label_levels(choice, choice$levels, data, rows)
    asked <- c(settings, sent_choice(choice, data))
    run_scoring(backend$barrier_evaluate, workers, model, rows, asked, call)
  }
  figures <- with_python_data(data, session, score)
  tell_levels(levels)
  if (all(lengths(figures) == 1L)) unlist(figures) else figures
}

#' @rdname barrier_evaluate
#' @export
barrier_predict <- function(
  sc,
  model,
  x,
  ...,
  workers = 2L,
  batch_size = 32L,
  custom_objects = NULL,
  safe_mode = TRUE,
  verbose = 1,
  timeout = 300
) {
  check_named_only(...)
  route <- check_sc(sc)
  check_scored_model(model, "a Keras model")
  settings <- scoring_settings(
    model,
    workers,
    batch_size,
    custom_objects,
    safe_mode,
    verbose,
    timeout
  )
  check_no_table(x)
  x <- check_newdata(x, of_fit(model, "features"), of_fit(model, "categories"))

  call <- rlang::current_env()
  backend <- pybackend()
  session <- open_session(route)
  rows <- as_input(x, as_feature_array)
  scores <- run_scoring(backend$barrier_predict, session, model, rows, settings, call)
  name_columns(scores, of_fit(model, "levels"))
}

run_scoring <- function(fn, session, model, rows, settings, call) {
  model <- as_python_model(model, call)
  settings <- lapply(settings, function(value) if (length(value)) value)
  do.call(call_python, c(list(fn, session, model, rows, call = call), settings))
}

check_scored_model <- function(model, kind, call = caller_env()) {
  if (!inherits(model, "tfdist_fit")) {
    expected <- sprintf("a tfdist_fit, %s or a function without arguments that returns one", kind)
    check_model(model, expected, call = call)
  }
}

# What both calls check alike. A fit brings along what its model needs.
scoring_settings <- function(
  model,
  workers,
  batch_size,
  custom_objects,
  safe_mode,
  verbose,
  timeout,
  call = caller_env()
) {
  check_custom_objects(custom_objects, call = call)
  check_flag(safe_mode, call = call)
  list(
    workers = check_count(workers, call = call),
    batch_size = check_count(batch_size, call = call),
    custom_objects = custom_objects %||% living_objects(of_fit(model, "custom_objects")),
    safe_mode = safe_mode && (of_fit(model, "safe_mode") %||% TRUE),
    verbose = check_verbose(verbose, call = call),
    timeout = check_positive(timeout, call = call)
  )
}

# What is not given is as in the training. The label may have another name there.
choice_of_fit <- function(choice, model) {
  categories <- of_fit(model, "categories")
  trained <- of_fit(model, "label")
  if (!is.null(trained) && !is.null(categories[[trained]])) {
    values <- categories[[trained]]
    categories[[trained]] <- NULL
    categories[[choice$label]] <- values
  }
  choice$features <- choice$features %||% of_fit(model, "features")
  choice$tensors <- choice$tensors %||% of_fit(model, "tensors")
  choice$categories <- utils::modifyList(as.list(categories), as.list(choice$categories))
  choice$levels <- of_fit(model, "levels")
  choice
}

of_fit <- function(model, field) if (inherits(model, "tfdist_fit")) model[[field]]

# The levels to tell: those of a label whose codes were not settled by the training.
check_levels_of_fit <- function(data, trained, call = caller_env()) {
  given <- levels(data$y)
  if (!is.null(given) && !is.null(trained) && !identical(given, trained)) {
    abort_input(
      c(
        "The label of `data` must be a factor with the levels of the training.",
        x = sprintf("`data`: %s.", list_names(given)),
        x = sprintf("The training: %s.", list_names(trained)),
        i = "Use `factor(y, levels = model$levels)`."
      ),
      call = call
    )
  }
  if (is.null(trained)) given
}

check_no_table <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (inherits(x, "tbl_spark")) {
    abort_input(
      c(
        sprintf("`%s` is a Spark table, whose rows have no order to answer in.", arg),
        i = "Fetch the feature columns with `dplyr::collect()`."
      ),
      call = call
    )
  }
}
