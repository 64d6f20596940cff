# Spark gives the rows, also those of the validation.
ml_options <- setdiff(
  barrier_train_options,
  c("label", "weight", "validation_data", "validation_split")
)

#' Use Keras models in Spark ML pipelines
#'
#' `ml_keras()` turns a Keras model into a stage for sparklyr pipelines. [barrier_train()] trains it
#' on the workers of the cluster, and the trained stage adds predictions to the rows of a table.
#'
#' @details The stage is an instance of the Python class `pybackend.ml.KerasEstimator`, which
#' Spark's own pipelines cannot contain. An `ml_pipeline()` to which you add such a stage therefore
#' becomes a `tfdist_ml_pipeline`. `ml_keras()` adds a stage to it, and so does `c(pipeline, stage)`
#' with a stage of sparklyr, e.g. `ft_index_to_string(sc, ...)`. sparklyr's `ml_fit()`,
#' `ml_transform()`, `ml_predict()` and `ml_save()` work as usual. `ml_save()` writes Spark ML's
#' format, which `PipelineModel.load()` reads in Python. sparklyr's `ml_load()` cannot read it,
#' because it supports only JVM stages: use [ml_load_keras()].
#'
#' A model that returns a number for each class, or a single probability, adds `raw_prediction_col`,
#' `probability_col` and `prediction_col` (the class as a double), as sparklyr's classifiers do. Any
#' other model adds `prediction_col`.
#'
#' @inheritParams barrier_train
#' @param x A `spark_connection`, an `ml_pipeline`, the result of `ml_keras()`, or a `tbl_spark`.
#' @param model A compiled Keras model, a [tfdist_fit], or an R function that takes no arguments and
#'   returns a model. The function is called once, in this session.
#' @param features_col,label_col,prediction_col,probability_col,raw_prediction_col Names of columns,
#'   as in sparklyr's classifiers.
#' @param weight_col Column with the weight of each row in the loss, or `NULL`.
#' @param validation_indicator_col Column that is true for validation rows, or `NULL`.
#' @param features Columns that form one input, or a named list with the columns for each input of
#'   the model. `NULL` uses `features_col`.
#' @param callbacks As in [barrier_train()]. A pipeline with `callbacks` cannot be saved, but the
#'   result of its `ml_fit()` can.
#' @param class_weight As in [barrier_train()]. Classes are numbers, as in `label_col`.
#' @param verbose As in [barrier_train()]; 0 is silent.
#' @param sc A `spark_connection`.
#' @param path Path for `ml_save()`: a path that all machines share, or a URI that Spark supports.
#' @return
#' * For a connection or a pipeline, a `tfdist_ml_pipeline`.
#' * For a table, the result of `ml_fit()`: a `tfdist_ml_model`. Its element `keras` is the trained
#'   stage, a Python object with `keras$model`, `keras$history` and `keras$levels`.
#' * `ml_load_keras()`: the saved `tfdist_ml_pipeline` or `tfdist_ml_model`.
#' @inheritSection barrier_train Errors
#' @export
#' @examples
#' \dontrun{
#' sc <- sparklyr::spark_connect(master = "yarn")
#' flowers <- dplyr::tbl(sc, "flowers")
#' pipeline <- sparklyr::ml_pipeline(sc) |>
#'   sparklyr::ft_string_indexer("species", "label") |>
#'   sparklyr::ft_vector_assembler(c("length", "width"), "features") |>
#'   ml_keras(model, workers = 8, epochs = 5)
#' fitted <- sparklyr::ml_fit(pipeline, flowers)
#' predicted <- sparklyr::ml_transform(fitted, flowers)
#' sparklyr::ml_multiclass_classification_evaluator(predicted, metric_name = "accuracy")
#' sparklyr::ml_save(fitted, "hdfs:///models/flowers")
#' }
ml_keras <- take_options(
  function(
    x,
    model,
    ...,
    features_col = "features",
    label_col = "label",
    prediction_col = "prediction",
    probability_col = "probability",
    raw_prediction_col = "rawPrediction",
    weight_col = NULL,
    validation_indicator_col = NULL,
    features = NULL,
    verbose = getOption("tfdist.verbose", 0)
  ) {
    check_dots_empty(...)
    check_installed("sparklyr", "A pipeline of Spark ML")
    sc <- pipeline_connection(x)
    check_model(model)
    advice <- "Train it further with `barrier_train()`, and predict with `predict()`."
    check_needs_no_r(model, advice)
    columns <- list(
      featuresCol = check_string(features_col),
      labelCol = check_string(label_col),
      predictionCol = check_string(prediction_col),
      probabilityCol = check_string(probability_col),
      rawPredictionCol = check_string(raw_prediction_col),
      weightCol = check_string(weight_col, allow_null = TRUE),
      validationIndicatorCol = check_string(validation_indicator_col, allow_null = TRUE),
      features = null_if_empty(as_python_features(check_features(features)))
    )
    settings <- check_arguments(c("workers", "epochs", "batch_size", "seed", "verbose"))
    options <- check_arguments(setdiff(ml_options, c("features", names(settings))))
    known <- options$model_options
    options["model_options"] <- list(if (!is.null(known$uri)) model_options(known$uri))

    # Stages are made of the classes of the attached PySpark.
    open_session(check_pipeline_connection(sc))
    names(settings)[names(settings) == "batch_size"] <- "batchSize"
    params <- c(columns, settings, list(trainOptions = as_train_options(options)))
    keras_model <- as_python_model(model, settings$seed)
    stage <- call_python(
      pybackend_ml()$KerasEstimator,
      keras_model,
      customObjects = known$custom_objects,
      safeMode = known$safe_mode %||% TRUE,
      !!!drop_null(params)
    )
    if (inherits(x, "tbl_spark")) {
      return(sparklyr::ml_fit(new_ml_pipeline(sc, list(stage)), x))
    }
    add_stage(x, stage)
  },
  ml_options
)

# Only the options that differ from the defaults, because they are saved with the pipeline.
as_train_options <- function(options) {
  is_equal <- function(value, default) isTRUE(all.equal(value, default))
  is_default <- mapply(is_equal, options, option_defaults[names(options)])
  options <- options[!is_default]
  options$class_weight <- class_weight_codes(options$class_weight, NULL)
  found <- drop_null(as_python_settings(options))
  # Without names, reticulate would make an empty list of Python, not a dict.
  names(found) <- as.character(names(found))
  found
}

#' @export
c.tfdist_ml_pipeline <- function(...) Reduce(add_stage, list(...))

add_stage <- function(x, stage) {
  sc <- pipeline_connection(x)
  stages <- if (inherits(x, "tfdist_ml_pipeline")) x$stages
  if (inherits(x, "ml_pipeline") && length(sparklyr::ml_stages(x))) {
    stages <- list(x)
  }
  fits <- is_python(stage) || inherits(stage, c("ml_pipeline_stage", "ml_pipeline"))
  check_fits(stage, fits, "a stage of a pipeline")
  new_ml_pipeline(sc, c(stages, list(stage)))
}

#' @rdname ml_keras
#' @export
ml_load_keras <- function(sc, path) {
  check_given()
  check_string(path)
  session <- open_session(check_pipeline_connection(sc))
  loaded <- call_python(pybackend_ml()$persistence$load_stages, session, absolute_path(path))
  make <- if (loaded[[1L]]) new_ml_model else new_ml_pipeline
  make(sc, list(loaded[[2L]]))
}

new_ml_pipeline <- function(sc, stages) {
  structure(list(sc = sc, stages = stages), class = "tfdist_ml_pipeline")
}

new_ml_model <- function(sc, stages) {
  keras <- call_python(pybackend_ml()$model$find_keras, Filter(is_python, stages))
  structure(list(sc = sc, stages = stages, keras = keras), class = "tfdist_ml_model")
}

#' @exportS3Method sparklyr::ml_fit
ml_fit.tfdist_ml_pipeline <- function(x, dataset, ...) {
  session <- open_session(check_pipeline_connection(x$sc))
  fitted <- list()
  for (stage in x$stages) {
    # A stage is trained on the rows that the stages before it return.
    dataset <- transform_by(fitted[length(fitted)], dataset, session)
    fitted[[length(fitted) + 1L]] <- fit_stage(stage, dataset, session)
  }
  new_ml_model(x$sc, fitted)
}

#' @exportS3Method sparklyr::ml_transform
ml_transform.tfdist_ml_model <- function(x, dataset, ...) {
  session <- open_session(check_pipeline_connection(x$sc))
  transform_by(x$stages, dataset, session)
}

#' @exportS3Method sparklyr::ml_predict
ml_predict.tfdist_ml_model <- function(x, dataset, ...) sparklyr::ml_transform(x, dataset)

# Python writes Spark ML's format. Stages of sparklyr are passed to it as files.
#' @exportS3Method sparklyr::ml_save
ml_save.tfdist_ml_pipeline <- function(x, path, overwrite = FALSE, ...) {
  check_string(path)
  check_flag(overwrite)
  path <- absolute_path(path)
  session <- open_session(check_pipeline_connection(x$sc))
  part_path <- paste0(path, ".part-", random_hex())
  on.exit(delete_from_spark(x$sc, part_path), add = TRUE)
  parts <- lapply(seq_along(x$stages), function(place) {
    stage <- x$stages[[place]]
    if (is_python(stage)) {
      return(stage)
    }
    saved <- paste0(part_path, "/", place)
    suppressMessages(sparklyr::ml_save(stage, saved))
    saved
  })
  persistence <- pybackend_ml()$persistence
  is_fitted <- inherits(x, "tfdist_ml_model")
  call_python(persistence$save_stages, session, parts, path, overwrite, is_fitted)
  invisible(NULL)
}

#' @exportS3Method sparklyr::ml_save
ml_save.tfdist_ml_model <- ml_save.tfdist_ml_pipeline

#' @export
print.tfdist_ml_pipeline <- function(x, ...) print_stages("Pipeline", x)

#' @export
print.tfdist_ml_model <- function(x, ...) print_stages("Pipeline model", x)

print_stages <- function(title, x) {
  name_of <- function(stage) if (is_python(stage)) stage$uid else sparklyr::ml_uid(stage)
  names <- vapply(x$stages, name_of, "")
  cat(sprintf("<%s with Keras>\n", title), sprintf("  %s\n", names), sep = "")
  invisible(x)
}

fit_stage <- function(stage, dataset, session) {
  if (!is_python(stage)) {
    return(if (inherits(stage, "ml_transformer")) stage else sparklyr::ml_fit(stage, dataset))
  }
  with_spark_frame(dataset, session, function(frame) call_python(stage$fit, frame))
}

# Lazily, one stage after another: a stage of Python returns a view that Spark computes if needed.
transform_by <- function(stages, dataset, session) {
  for (stage in stages) {
    if (is_python(stage)) {
      sc <- sparklyr::spark_connection(dataset)
      dataset <- with_spark_frame(dataset, session, function(frame) {
        show_spark_frame(call_python(stage$transform, frame), sc, "predictions")
      })
    } else {
      dataset <- sparklyr::ml_transform(stage, dataset)
    }
  }
  dataset
}

delete_from_spark <- function(sc, path) {
  place <- sparklyr::invoke_new(sc, "org.apache.hadoop.fs.Path", path)
  settings <- sparklyr::invoke(sparklyr::spark_context(sc), "hadoopConfiguration")
  sparklyr::invoke(sparklyr::invoke(place, "getFileSystem", settings), "delete", place, TRUE)
}

pipeline_connection <- function(x) {
  if (inherits(x, "tfdist_ml_pipeline")) {
    return(x$sc)
  }
  fits <- inherits(x, c("spark_connection", "ml_pipeline", "tbl_spark"))
  check_fits(x, fits, "a connection, an `ml_pipeline()` or a table of sparklyr")
  check_pipeline_connection(sparklyr::spark_connection(x))$sc
}

check_pipeline_connection <- function(sc) {
  route <- check_sc(sc, "sc")
  if (route$kind != "sparklyr") {
    advice <- "Connect with `sparklyr::spark_connect()`, without `method = \"spark_connect\"`."
    abort_input("Pipelines with Keras need a connection of sparklyr itself.", i = advice)
  }
  check_installed("dplyr", "A Spark table")
  route
}

pybackend_ml <- function() {
  pybackend()
  reticulate::import("pybackend.ml")
}

drop_null <- function(x) x[!vapply(x, is.null, NA)]
