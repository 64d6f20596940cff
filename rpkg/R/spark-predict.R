# Predictions for the rows of a Spark table: a view that Spark computes when its rows are needed.

predict_table <- function(fit, table, type, columns, on_missing, batch_size, runtime) {
  check_needs_no_r(fit, "Predict for the rows that `dplyr::collect(newdata)` fetches.")
  check_installed("dplyr", "A Spark table")
  sc <- sparklyr::spark_connection(table)
  route <- check_sc(sc, "newdata")
  check_can_prepare(fit$preparation, table, "newdata")
  columns <- table_columns(fit, colnames(table), columns)
  batch_size <- check_count(batch_size %||% 256L, arg = "batch_size")

  session <- open_session(route)
  model <- fit_model(fit)
  levels <- model_levels(model, fit$levels)
  with_spark_frame(table, session, function(frame) {
    predicted <- call_python(
      pybackend()$predict_spark,
      model,
      frame,
      !!!columns,
      type = type,
      levels = levels,
      on_missing = on_missing,
      batch_size = batch_size,
      runtime = runtime %||% "keras",
      model_options = as_python_options(complete_settings(list(), fit)$model_options)
    )
    check_sql_names(setdiff(unlist(predicted$columns), colnames(table)))
    show_spark_frame(predicted, sc, "predictions")
  })
}

# sparklyr counts apostrophes in its SQL, and Spark replaces `${...}` there.
check_sql_names <- function(names) {
  apostrophes <- lengths(regmatches(names, gregexpr("'", names, fixed = TRUE)))
  odd <- names[apostrophes %% 2L == 1L | grepl("${", names, fixed = TRUE)]
  if (length(odd)) {
    advice <- "Use `type = \"class\"` or `type = \"raw\"`, or rename the classes of the training."
    abort_input(sprintf("sparklyr cannot read a column named \"%s\".", odd[[1L]]), i = advice)
  }
}

# Options that were not passed are those of the training, without those of its label.
table_columns <- function(fit, present, given) {
  features <- check_features(given$features, "features") %||% fit$features
  tensors <- given$tensors %||% fit$tensors
  categories <- given$categories %||% fit$categories
  known <- with_named_fields(present, features)
  check_columns(unlist(features), known, "newdata", "a feature of the training")
  read <- unlist(features) %||% present
  as_values <- function(values) as.list(as_comparable_values(values))
  columns <- list(
    features = as_python_features(features),
    tensors = lapply(tensors[names(tensors) %in% read], as_python_tensor),
    categories = lapply(categories[names(categories) %in% read], as_values),
    encode = as.list(fit$encode)[names(fit$encode) %in% intersect(read, names(categories))]
  )
  lapply(columns, null_if_empty)
}

# A model may distinguish fewer classes than the label has levels, or none.
model_levels <- function(model, levels) {
  if (length(levels)) {
    known <- call_bridge("match_levels", model, as.list(levels))
    if (!is.null(known)) as.list(known)
  }
}

check_only_tables <- function(columns) {
  given <- names(Filter(Negate(is.null), columns))
  if (length(given)) {
    problem <- sprintf("`%s` works only with Spark tables, and `newdata` is not one.", given[[1L]])
    abort_input(problem, i = sprintf("Leave out `%s`.", given[[1L]]))
  }
}
