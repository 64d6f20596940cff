# Predictions beside the rows of a Spark table: a view that Spark computes when rows are asked for.

predict_table <- function(fit, table, type, features, tensors, categories, batch_size, call) {
  check_installed("dplyr", "A Spark table", call)
  check_choice(type, c("class", "prob", "raw"), allow_null = TRUE, arg = "type", call = call)
  sc <- sparklyr::spark_connection(table)
  route <- check_sc(sc, "newdata", call)
  choice <- table_choice(fit, colnames(table), features, tensors, categories, call)
  batch_size <- check_count(batch_size %||% 256L, arg = "batch_size", call = call)

  backend <- pybackend(call)
  session <- open_session(route, call)
  model <- fit_model(fit, call)
  levels <- levels_told_by(model, fit$levels, call)
  name <- paste0("tfdist_predictions_", random_hex())
  with_spark_frame(table, session, function(frame) {
    predicted <- call_python(
      backend$predict_spark,
      model,
      frame,
      features = choice$features,
      tensors = choice$tensors,
      categories = choice$categories,
      type = type,
      levels = levels,
      batch_size = batch_size,
      custom_objects = living_objects(fit$custom_objects),
      safe_mode = fit$safe_mode,
      call = call
    )
    predicted$createOrReplaceTempView(name)
  })
  dplyr::tbl(sc, name)
}

# What is not named is as in the training; what that said of its label does not count here.
table_choice <- function(fit, columns, features, tensors, categories, call) {
  features <- check_features(features, call = call) %||% fit$features
  tensors <- check_tensors(tensors, call = call) %||% fit$tensors
  categories <- check_categories(categories, call = call) %||% fit$categories
  check_columns(unlist(features), columns, "newdata", "a feature of the training", call)
  read <- unlist(features) %||% columns
  choice <- list(
    features = if (is.list(features)) lapply(features, as.list) else as.list(features),
    tensors = lapply(tensors[names(tensors) %in% read], python_promise),
    categories = lapply(categories[names(categories) %in% read], as.list)
  )
  lapply(choice, function(value) if (length(value)) value)
}

# A model may tell fewer classes apart than the label has levels, or none.
levels_told_by <- function(model, levels, call) {
  if (length(levels)) {
    told <- call_python(pybackend(call)$bridge$levels_told_by, model, as.list(levels), call = call)
    if (!is.null(told)) as.list(told)
  }
}

check_only_tables <- function(..., call = caller_env()) {
  given <- names(Filter(Negate(is.null), list(...)))
  if (length(given)) {
    abort_input(
      sprintf("`%s` is for Spark tables; `newdata` is none.", given[[1L]]),
      call = call
    )
  }
}
