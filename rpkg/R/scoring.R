#' Evaluate a model, or predict with it, on several workers
#'
#' `barrier_evaluate()` distributes the rows across `workers` processes and returns the values that
#' one process would compute from all of them: a metric such as the AUC covers all rows.
#' `barrier_predict()` returns the model's predictions in the order of the rows.
#'
#' @inheritParams barrier_train
#' @inheritParams call_options
#' @param model A [tfdist_fit], a Keras model, or an R function that takes no arguments and returns
#'   a model. For evaluation, it must be compiled.
#' @param data The rows to evaluate the model on, in any form that [barrier_train()] accepts. If
#'   `model` is a fit, a factor label must have the same levels as in training.
#' @param x The rows to predict for: an array with rows along the first dimension, a list of arrays
#'   for a model with several inputs, or a data frame.
#' @param type,on_missing As in [predict.tfdist_fit()].
#' @param label The label column of a data frame, table or files, as in [barrier_train()]. A text
#'   label or text features require a fit that stores their values, or `categories` in
#'   `data_options`. The default is the label that the fit was trained with. If the data do not have
#'   that column, or `model` is not a fit, the default is the column named `label`. `NULL`: the rows
#'   have no labels.
#' @param features The feature columns, as in [barrier_train()]. `NULL` (default): those of the fit
#'   or, if there are none, all columns that no other argument names.
#' @param data_options As in [barrier_train()]. By default, `tensors`, `categories` and (for each
#'   column) `encode` are taken from the fit.
#' @param workers Number of workers. `NULL`: 2, or the number of sessions that join (see
#'   [join_workers()]). You can set the default as an option; see [tfdist_options].
#' @param model_options [model_options()]: custom classes of the model. Those of a fit are known.
#'   For a fit that was trained with `safe_mode = FALSE`, it is always `FALSE`.
#' @param verbose 0 and 1 show nothing; 2 shows what the workers print.
#' @return
#' * `barrier_evaluate()`: a named vector with the `loss` and each metric; a list if a metric has
#'   several values.
#' * `barrier_predict()`: the same as [predict.tfdist_fit()] for the same `type`. By default, a
#'   tibble for a data frame. For other inputs the model's raw outputs: an array with a row for each
#'   row of `x`, with the levels of the label as column names if `model` is a fit that has them; a
#'   list of arrays for a model with several outputs.
#' @inheritSection barrier_train Errors
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' digits <- mnist(limit = 640)
#' fit <- train_mnist("local", workers = 2, epochs = 1, limit = 640, verbose = 0)
#' x <- digits$x_test / 255
#' barrier_evaluate("local", fit, list(x, digits$y_test), workers = 2)
#' scores <- barrier_predict("local", fit, x, workers = 2)
#' table(guess = max.col(scores, "first") - 1, digit = digits$y_test)
barrier_evaluate <- take_options(
  function(sc, model, data, ...) {
    check_dots_empty(...)
    route <- check_sc(sc)
    check_scored_model(model, "a compiled Keras model")
    settings <- scoring_settings(model)
    given <- list(
      label = if (!missing(label)) rlang::enquo(label) else scored_label(model, data),
      features = rlang::enquo(features),
      weight = if (!missing(weight)) rlang::enquo(weight)
    )
    rows <- check_scored_rows(given, data_options, data, model, route)
    if (settings$verbose > 0) {
      inform_levels(rows$levels)
    }

    session <- open_session(route)
    runs_r <- is_r_function(rows$data) || is_rebuilt(model)
    launcher <- if (runs_r) open_r_workers(route) else session
    figures <- with_python_data(rows$data, session, function(sent) {
      columns <- add_label_levels(rows$columns, rows$data, sent)
      columns <- as_python_columns(columns, rows$data, NULL)
      run_scoring("barrier_evaluate", launcher, model, sent, settings, columns)
    })
    record_evaluation(plain_metrics(figures))
  },
  barrier_evaluate_options
)

#' @rdname barrier_evaluate
#' @export
barrier_predict <- take_options(
  function(sc, model, x, ..., type = NULL) {
    check_dots_empty(...)
    route <- check_sc(sc)
    check_scored_model(model, "a Keras model")
    check_one_of(type, c("class", "prob", "raw"), allow_null = TRUE)
    settings <- scoring_settings(model)
    check_no_table(x)
    checked <- check_newdata(x, model, on_missing)

    session <- if (is_rebuilt(model)) open_r_workers(route) else open_session(route)
    rows <- as_input(checked$rows, as_feature_array)
    # Before anything is computed: the model's outputs name the columns.
    here <- if (is.function(model) && shows_columns(type, x)) model() else model
    scores <- run_scoring("barrier_predict", session, model, rows, settings, NULL)
    shape_scores(scores, here, checked$complete, type, x)
  },
  barrier_predict_options
)

run_scoring <- function(name, launcher, model, rows, settings, columns) {
  options <- c(as_python_settings(settings), columns)
  call_python(pybackend()[[name]], launcher, as_sent_model(model), rows, !!!options)
}

# The rows to evaluate, checked: `data`, the `columns` to read, and the `levels` of a label whose
# codes the training did not define. `given` are quosures as in choose_columns().
check_scored_rows <- function(given, data_options, data, model, route, arg = "data") {
  given <- choose_columns(given, NULL, data_options, data)
  columns <- complete_columns(given, model)
  # Levels are not determined from these rows, whose values may differ.
  columns$finds_levels <- FALSE
  data <- check_data(data, columns, route, arg = arg)
  check_has_columns(given, data)
  columns$features <- data$features %||% columns$features
  if (is.null(columns$levels)) {
    return(list(data = data, columns = columns, levels = levels(data$y)))
  }
  list(data = match_levels(data, columns$levels), columns = columns)
}

check_scored_model <- function(model, kind) {
  expected <- sprintf("a tfdist_fit, %s or a function without arguments that returns one", kind)
  check_model(model, expected)
}

# The arguments that both calls share, from the call's frame.
scoring_settings <- function(model, frame = caller_env()) {
  shared <- c("workers", "batch_size", "resources", "model_options", "verbose", "timeout")
  complete_settings(check_arguments(shared, frame), model)
}

# A fit provides the classes that its model needs.
complete_settings <- function(settings, model) {
  if (inherits(model, "tfdist_fit")) {
    options <- settings$model_options %||% model_options()
    objects <- options$custom_objects %||% living_objects(model$custom_objects)
    options["custom_objects"] <- list(objects)
    options$safe_mode <- isTRUE(options$safe_mode) && model$safe_mode
    settings$model_options <- options
  }
  settings
}

# Options that were not passed are those of the training, where the label may have another name.
complete_columns <- function(columns, model) {
  if (!inherits(model, "tfdist_fit")) {
    if (is_python(model)) {
      columns$text_inputs <- find_text_inputs(model)
    }
    return(columns)
  }
  fields <- c("feature_names", "preparation", "levels", "formula")
  columns[fields] <- lapply(fields, function(field) model[[field]])
  categories <- model$categories
  trained <- model$label
  are_single <- rlang::is_string(trained) && rlang::is_string(columns$label)
  if (are_single && trained %in% names(categories)) {
    names(categories)[names(categories) == trained] <- columns$label
  }
  if (is.null(columns$features)) {
    columns$features <- model$features
    columns$known_from <- if (!is.null(columns$features)) "the training"
  }
  # A recipe names the weights by a role; a formula has none.
  columns$weight <- columns$weight %||% columns$preparation$weight
  # Fewer features than those of the training may be given.
  used <- c(unlist(columns$features), unlist(columns$label), columns$weight)
  of_used <- function(x) if (is.null(columns$features)) x else x[names(x) %in% used]
  columns$tensors <- columns$tensors %||% null_if_empty(of_used(model$tensors))
  categories <- utils::modifyList(as.list(of_used(categories)), as.list(columns$categories))
  columns["categories"] <- list(null_if_empty(categories))
  trained <- model$encode
  trained <- null_if_empty(trained[names(trained) %in% unlist(columns$features)])
  if (is.null(columns$encode)) {
    columns$encode <- trained
  } else if (!is.null(names(columns$encode))) {
    columns$encode <- utils::modifyList(as.list(trained), as.list(columns$encode))
  }
  columns$finds_levels <- FALSE
  columns
}

# The default label is that of the training. It cannot change if a formula or a recipe named it;
# otherwise data may have a column `label` instead.
scored_label <- function(model, data) {
  trained <- fit_field(model, "label") %||% "label"
  if (!is.null(fit_field(model, "formula")) || !is.null(fit_field(model, "preparation"))) {
    return(trained)
  }
  present <- column_names(known_columns(data))
  if (!all(unlist(trained) %in% present) && "label" %in% present) "label" else trained
}

fit_field <- function(model, field) if (inherits(model, "tfdist_fit")) model[[field]]

check_no_table <- function(x, arg = caller_arg(x)) {
  if (inherits(x, "tbl_spark")) {
    problem <- "`%s` is a Spark table, whose rows have no order to return predictions in."
    advice <- "Fetch the feature columns with `dplyr::collect()`, or use `predict()` of a fit."
    abort_input(sprintf(problem, arg), i = advice)
  }
}
