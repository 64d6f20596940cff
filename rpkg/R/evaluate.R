#' Evaluate a fit in this session
#'
#' Methods for two generics named `evaluate()`: one in keras3 and tensorflow, and one in generics.
#' Arrays and data frames are evaluated in this process. Tables, files and all other data that
#' [barrier_evaluate()] accepts are evaluated by one worker.
#'
#' @inheritParams barrier_evaluate
#' @param object A [tfdist_fit].
#' @param x,y The features and the labels. Alternatively, pass only `x`, with the rows in any form
#'   that [barrier_evaluate()] accepts.
#' @param label The label column, as in [barrier_train()]. `NULL`: the label that the fit was
#'   trained with.
#'
#' @return The same value that [barrier_evaluate()] returns: a named vector with the `loss` and each
#'   metric; a list if a metric has several values.
#' @exportS3Method generics::evaluate
#' @rawNamespace S3method(tensorflow::evaluate, tfdist_fit)
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && rlang::is_installed("generics")
#' digits <- mnist(limit = 640)
#' fit <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' generics::evaluate(fit, digits$x_test / 255, digits$y_test)
evaluate.tfdist_fit <- function(
  object,
  x,
  y = NULL,
  ...,
  label = NULL,
  features = NULL,
  weight = NULL,
  data_options = NULL,
  batch_size = 32L
) {
  check_dots_empty(...)
  label <- rlang::enquo(label)
  if (rlang::quo_is_null(label)) {
    label <- object$label %||% "label"
  }
  features <- rlang::enquo(features)
  weight <- rlang::enquo(weight)
  data <- if (is.null(y)) x else list(x, y)
  if (!is.list(data) || is_python(data) || inherits(data, "tbl_spark")) {
    sc <- if (inherits(data, "tbl_spark")) sparklyr::spark_connection(data) else "local"
    return(barrier_evaluate(
      sc,
      object,
      data,
      label = !!label,
      features = !!features,
      weight = !!weight,
      data_options = data_options,
      workers = 1L,
      batch_size = batch_size
    ))
  }
  batch_size <- check_count(batch_size)
  given <- list(label = label, features = features, weight = weight)
  arg <- if (is.null(y)) "x" else "list(x, y)"
  rows <- check_scored_rows(given, data_options, data, object, check_sc("local"), arg)
  evaluate_in_session(object, rows$data, batch_size, rlang::current_env())
}

evaluate_in_session <- function(fit, data, batch_size, call) {
  model <- fit_model(fit, call)
  if (!isTRUE(model$compiled)) {
    abort_input(
      "The model of this fit is not compiled.",
      i = "Compile `fit$model`, and evaluate that.",
      call = call
    )
  }
  figures <- call_bridge("evaluate_rows", model, as_python_arrays(data), batch_size, call = call)
  figures <- plain_metrics(figures[order(names(figures) != "loss")])
  record_evaluation(figures)
  figures
}

plain_metrics <- function(figures) {
  if (all(lengths(figures) == 1L)) unlist(figures) else lapply(figures, as.vector)
}
