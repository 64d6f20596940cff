#' Deploy a model to a database as SQL
#'
#' Translates a trained model to SQL, so that a database can compute predictions for its own rows
#' with one `SELECT`, without Python. `deploy_model()` deploys a model to a database as a view, and
#' `undeploy_model()` removes it. `augment_sql()` adds predictions to a dbplyr table or query
#' lazily: nothing is computed until rows are requested. `to_sql()` only returns the SQL.
#'
#' @details
#' Models built with `keras_model_sequential()` or `keras_model()` can be translated to SQL if they
#' contain only dense, convolution, pooling, normalization, embedding, recurrent and merging layers.
#' Any other layer raises an error that names it, before anything is written. Numbers are float32 or
#' more precise, and are summed in a different order than in Keras: expect differences of about
#' 1e-6. A row with a feature that is missing, not a number, infinite or too large for float32 gets
#' no prediction. Text and factors are encoded as they were when the fit was trained, and a row with
#' a value that was not in the training data gets no prediction. Any other column that does not hold
#' numbers raises an error that names it. In PostgreSQL, before you use the SQL from `to_sql()`,
#' cast booleans and pgvector vectors to numbers in a view.
#'
#' The features of a formula or a recipe are computed in SQL, too, with the numbers and levels from
#' training: for a formula, arithmetic, logarithms, powers, `scale()`, conditions, factors and
#' interactions; for a recipe, the steps that the orbital package can translate. Anything that
#' cannot be translated raises an error that names it. Before anything is created, the results for
#' up to 50 rows of the table are compared with R's own, and any difference raises an error. For
#' this comparison, `to_sql()` needs a connection, not just a dialect.
#'
#' Deployment runs in one transaction, in which the database's predictions are compared with those
#' of Keras. If anything fails, nothing is left behind. (Spark has no transactions, so anything that
#' was created is dropped again.) Deploying again under the same name creates the next version: the
#' `name` view shows the newest version, and the `name_v1`, `name_v2`, ... views remain. The
#' `tfdist_models` table records each deployment and its time.
#'
#' In SQLite, the SQL needs mathematical functions. RSQLite provides them in an extension, which
#' tfdist loads. Any other session that reads the view must first call
#' `RSQLite::initExtension(con, "math")`.
#'
#' The `.pred_class` column contains the predicted class, and the `.pred_<level>` columns contain
#' the probability of each class. The model's raw output is in `.pred`, or in `.pred_<output>` for
#' each of several outputs. If the model uses a Keras loss with `from_logits`, the SQL computes the
#' softmax or sigmoid, too. If the outputs are not probabilities, there are no `.pred_<level>`
#' columns.
#'
#' `augment_sql()` writes the model's weights to a temporary table on this connection. The table,
#' and therefore the query, exists only until the connection is closed.
#'
#' @param model A [tfdist_fit] or a Keras model.
#' @param con A DBI connection to DuckDB, PostgreSQL or SQLite, outside of a transaction, or a
#'   sparklyr connection.
#' @param dialect A connection, or one of `"duckdb"`, `"postgresql"`, `"sqlite"`, `"spark"` and
#'   `"oracle"` (not tested with an Oracle database).
#' @param name Name of the view.
#' @param table Name of the table with the rows. To specify a schema, use `c("schema", "table")` or
#'   a DBI or dbplyr object: `DBI::Id()`, `dbplyr::in_schema()`, `dplyr::tbl()`.
#' @param key Columns to show with the predictions.
#' @param features The column that holds the model's input as arrays (in SQLite, as JSON text), or
#'   several columns with one number each. For a model with several inputs, a named list of these.
#'   `NULL` (default): the features used in training.
#' @param type `"class"`, `"prob"`, `"raw"`, or `NULL` (default). The meaning of `NULL` depends on
#'   the model, as in [predict.tfdist_fit()].
#' @param levels Names of the classes. `NULL` (default): those from training or, if there are none,
#'   the class numbers.
#' @param weights Name of the table from which the query reads the weights.
#' @param version Version to remove. `NULL` (default): all versions.
#' @param x A dbplyr table or query. The result has the same groups.
#' @return `deploy_model()`: a list with the `name`, the `version`, the names of this version's view
#'   (`view`) and weights table (`weights`), and the largest `difference` between the database's
#'   predictions and those of Keras. `undeploy_model()`: `name`, invisibly. `augment_sql()`: a
#'   dbplyr query with all columns of `x` and the predictions. `to_sql()`: a list with the
#'   `dialect`, the `query`, the name of the weights table (`weights`), and its `rows`.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && rlang::is_installed("duckdb")
#' fit <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' con <- DBI::dbConnect(duckdb::duckdb())
#' images <- matrix(mnist(limit = 5)$x_test / 255, nrow = 5)
#' rows <- data.frame(id = 1:5)
#' rows$image <- lapply(rows$id, function(row) images[row, ])
#' DBI::dbWriteTable(con, "images", rows)
#' deploy_model(con, fit, "digits", "images", key = "id", features = "image")
#' DBI::dbGetQuery(con, 'SELECT id, ".pred_class" FROM digits')
#' DBI::dbDisconnect(con)
deploy_model <- function(
  con,
  model,
  name,
  table,
  key,
  features = NULL,
  type = NULL,
  levels = NULL
) {
  check_given()
  check_string(name)
  database <- open_database(con, "con")
  table <- check_table_name(table, con)
  asked <- check_asked(model, table, key, features, type, levels, con)
  deploy <- pybackend()$deploy_model
  made <- call_python(deploy, database, asked$model, name, table = asked$table, !!!asked$columns)
  fields <- c("name", "version", "view", "weights", "difference")
  lapply(rlang::set_names(fields), function(field) made[[field]])
}

#' @rdname deploy_model
#' @export
undeploy_model <- function(con, name, version = NULL) {
  check_given()
  check_string(name)
  version <- check_count(version, allow_null = TRUE)
  database <- open_database(con, "con")
  call_python(pybackend()$undeploy_model, database, name, version = version)
  invisible(name)
}

#' @rdname deploy_model
#' @export
augment_sql <- function(x, model, features = NULL, type = NULL, levels = NULL) {
  check_given()
  check_installed(c("dplyr", "dbplyr"), "A query")
  if (!inherits(x, "tbl_lazy")) {
    abort_input("`x` must be a table or query of dbplyr, such as `dplyr::tbl(con, \"rows\")`.")
  }
  con <- dbplyr::remote_con(x)
  database <- open_database(con, "x")
  columns <- colnames(x)
  asked <- check_asked(model, list("rows"), columns, features, type, levels, rows = x)
  query <- call_bridge(
    "augment",
    database,
    asked$model,
    asked$sql %||% as.character(dbplyr::remote_query(x)),
    columns = as.list(c(columns, if (!is.null(asked$sql)) unlist(asked$columns$features))),
    !!!asked$columns
  )
  scored <- dplyr::tbl(con, dplyr::sql(query))
  dplyr::group_by(scored, !!!rlang::syms(dplyr::group_vars(x)))
}

#' @rdname deploy_model
#' @export
to_sql <- function(
  model,
  dialect,
  table,
  key,
  features = NULL,
  type = NULL,
  levels = NULL,
  weights = "model_weights"
) {
  check_given()
  check_string(weights)
  table <- check_table_name(table, dialect)
  con <- if (!rlang::is_string(dialect)) dialect
  if (is.null(con)) {
    check_one_of(dialect, c("duckdb", "postgresql", "sqlite", "spark", "oracle"))
  } else {
    dialect <- find_dialect(dialect, "dialect")
  }
  asked <- check_asked(model, table, key, features, type, levels, con)
  given <- c(list(table = asked$table, weights = weights), asked$columns)
  made <- call_python(pybackend()$to_sql, asked$model, dialect, !!!given)
  described <- pybackend()$bridge$describe_sql(made)
  rows <- data.frame(part = as.character(described$part), place = as.integer(described$place))
  rows$numbers <- lapply(described$numbers, as.numeric)
  list(dialect = dialect, query = described$query, weights = weights, rows = rows)
}

# The arguments that define the computation, as Python takes them. The computations of a formula or
# a recipe become a query of `rows`, or of the connection's table.
check_asked <- function(model, table, key, features, type, levels, con = NULL, rows = NULL) {
  check_model_object(model)
  is_fit <- inherits(model, "tfdist_fit")
  prepared <- categories <- encode <- NULL
  key <- check_strings(key)
  features <- check_features(features)
  check_one_of(type, c("class", "prob", "raw"), allow_null = TRUE)
  levels <- check_strings(levels, allow_null = TRUE)
  if (is_fit && is.null(features)) {
    if (!is.null(model$preparation)) {
      rows <- rows %||% open_rows(con, table)
      prepared <- prepare_query(rows, key, model)
    }
    if (any(names(model$tensors) %in% unlist(model$features))) {
      problem <- "`features` is needed: training read columns with `tensors`, which SQL cannot."
      abort_input(problem, i = "Pass a column of arrays of numbers.")
    }
    features <- model$features
    categories <- model$categories[names(model$categories) %in% unlist(features)]
    encode <- model$encode[names(model$encode) %in% names(categories)]
    if (!is.null(prepared)) {
      renamed <- function(x) rlang::set_names(x, unname(prepared$features[names(x)]))
      features <- unname(prepared$features)
      categories <- if (length(categories)) renamed(categories)
      encode <- if (length(encode)) renamed(encode)
    }
  }
  if (is.null(features)) {
    abort_input("`features` is needed: the columns that make up the model's input.")
  }
  keras_model <- if (is_fit) fit_model(model) else model
  list(
    model = keras_model,
    table = if (is.null(prepared)) table else pybackend()$bridge$SourceQuery(prepared$sql),
    sql = prepared$sql,
    # The arguments that have the same names in all calls.
    columns = list(
      key = as.list(key),
      features = if (is.list(features)) {
        lapply(features, function(names) if (length(names) == 1L) names[[1L]] else as.list(names))
      } else {
        pybackend()$bridge$pick_columns(keras_model, as.list(features))
      },
      type = type,
      levels = as_list_or_null(levels) %||% model_levels(keras_model, fit_field(model, "levels")),
      categories = null_if_empty(lapply(categories, as.list)),
      encode = null_if_empty(as.list(encode))
    )
  )
}

open_rows <- function(con, table) {
  if (is.null(con)) {
    abort_input(
      "A formula or a recipe computed the features of the training in R.",
      i = "Pass a connection as `dialect` to translate it to SQL.",
      i = "Or compute the columns in the database, and pass their names as `features`."
    )
  }
  check_installed("dplyr", "A formula or a recipe in SQL")
  quoted <- DBI::dbQuoteIdentifier(con, DBI::Id(unlist(table)))
  rows <- dplyr::sql(paste("SELECT * FROM", quoted))
  or_abort(dplyr::tbl(con, rows), sprintf("`table` cannot be read: %s.", quoted))
}

as_list_or_null <- function(x) if (!is.null(x)) as.list(x)
