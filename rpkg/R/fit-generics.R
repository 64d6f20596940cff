# Methods of a fit for generics of other packages than stats.

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
  label <- if (rlang::quo_is_null(label)) object$label %||% "label" else label
  features <- rlang::enquo(features)
  weight <- rlang::enquo(weight)
  data <- if (is.null(y)) x else list(x, y)
  if (!is_r_list(data) || inherits(data, "tbl_spark")) {
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
  evaluate_in_session(object, rows$data, batch_size)
}

evaluate_in_session <- function(fit, data, batch_size) {
  model <- fit_model(fit)
  if (!isTRUE(model$compiled)) {
    problem <- "The model of this fit is not compiled."
    abort_input(problem, i = "Compile `fit$model`, and evaluate that.")
  }
  figures <- call_bridge("evaluate_rows", model, as_python_arrays(data), batch_size)
  record_evaluation(plain_metrics(figures[order(names(figures) != "loss")]))
}

plain_metrics <- function(figures) {
  if (all(lengths(figures) == 1L)) unlist(figures) else lapply(figures, as.vector)
}

#' Export the model of a fit
#'
#' Methods for generics in other packages. `tensorflow::export_savedmodel()`, which keras3 also
#' exports, writes the model as a SavedModel, for TensorFlow Serving and similar tools.
#' `bundle::bundle()` converts the fit to a single R object that any R session can read. `saveRDS()`
#' alone can do this, too, but only `bundle()` includes a model that is stored in a file
#' (`model_uri`).
#'
#' @param object,x A [tfdist_fit].
#' @param export_dir_base Folder to write to.
#' @param ... Arguments for Keras's `model$export()`, such as `format`. Must be empty for
#'   `bundle()`.
#' @return `export_savedmodel()` returns its `object`, invisibly; `bundle()` returns a bundle.
#' @name export_fit
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && rlang::is_installed("tensorflow")
#' fit <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' tensorflow::export_savedmodel(fit, tempfile("digits-"))
NULL

#' @rdname export_fit
#' @exportS3Method tensorflow::export_savedmodel
export_savedmodel.tfdist_fit <- function(object, export_dir_base, ...) {
  check_given()
  check_string(export_dir_base)
  path <- path.expand(export_dir_base)
  call_bridge("check_writable", path, "export_dir_base")
  model <- fit_model(object)
  # TensorFlow writes generated code to temporary files. Within R, they are not removed when Python
  # ends, so use R's own temporary folder, which is removed with the session.
  tempfile <- reticulate::import("tempfile")
  before <- tempfile$tempdir
  tempfile$tempdir <- tempdir()
  on.exit(tempfile$tempdir <- before)
  call_python(model$export, path, ..., verbose = FALSE)
  invisible(object)
}

#' @rdname export_fit
#' @exportS3Method bundle::bundle
bundle.tfdist_fit <- function(x, ...) {
  check_dots_empty(...)
  if (!is.null(x$model_uri)) {
    x["model_base64"] <- list(call_bridge("read_model_text", x$model_uri))
    x["model_uri"] <- list(NULL)
  }
  x["decoded"] <- list(new.env(parent = emptyenv()))
  situate <- bundle::situate_constr(function(object) {
    requireNamespace("tfdist")
    object
  })
  bundle::bundle_constr(object = x, situate = situate, desc_class = "tfdist_fit")
}

#' Tidy a fit
#'
#' Methods for functions in the generics package, which broom and tidymodels also export.
#'
#' @param x A [tfdist_fit].
#' @param new_data As `newdata` in [predict.tfdist_fit()]: a data frame or a sparklyr table.
#' @param ... For `augment()`: arguments of [predict.tfdist_fit()], such as `type`.
#' @return Tibbles, or data frames if the tibble package is not installed.
#' * `tidy()`: the history, as in `as.data.frame()`;
#' * `glance()`: one row with `workers`, `epochs`, `rows`, `seconds`, `seed` and the last value of
#'   each metric;
#' * `augment()`: `new_data` with the predictions as additional columns; a `tbl_spark` for a Spark
#'   table.
#' @name tidy.tfdist_fit
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && rlang::is_installed("generics")
#' fit <- train_mnist("local", workers = 1, epochs = 2, limit = 640, verbose = 0)
#' generics::tidy(fit)
#' generics::glance(fit)
NULL

#' @rdname tidy.tfdist_fit
#' @exportS3Method generics::tidy
tidy.tfdist_fit <- function(x, ...) {
  check_dots_empty(...)
  as_rows(as.list(as.data.frame(x)))
}

#' @rdname tidy.tfdist_fit
#' @exportS3Method generics::glance
glance.tfdist_fit <- function(x, ...) {
  check_dots_empty(...)
  counts <- list(workers = nrow(x$workers), epochs = x$epochs, rows = sum(x$workers$rows))
  training <- c(counts, seconds = x$seconds, seed = x$seed %||% NA_integer_)
  as_rows(c(training, as.list(last_metrics(x))))
}

#' @rdname tidy.tfdist_fit
#' @exportS3Method generics::augment
augment.tfdist_fit <- function(x, new_data, ...) {
  check_given()
  if (inherits(new_data, "tbl_spark")) {
    return(stats::predict(x, new_data, ...))
  }
  check_no_database(new_data, "new_data", predicts = TRUE)
  check_fits(new_data, is.data.frame(new_data), "a data frame or a Spark table")
  predicted <- stats::predict(x, new_data, ...)
  if (!is.data.frame(predicted)) {
    problem <- "`type = \"raw\"` gives an array, not columns."
    abort_input(problem, i = "Leave `type` out, or use \"class\" or \"prob\".")
  }
  taken <- intersect(names(predicted), names(new_data))
  if (length(taken)) {
    problem <- sprintf("`new_data` has a column \"%s\" already.", taken[[1L]])
    abort_input(problem, i = "Rename or remove it.")
  }
  as_rows(c(as.list(new_data), as.list(predicted)), nrow(predicted))
}
