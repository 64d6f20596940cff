#' Deploy a model to a database as SQL
#'
#' A trained model becomes SQL, so that a database classifies its own rows with one `SELECT`,
#' without Python. `deploy_model()` deploys a model to a database as a view, and `undeploy_model()`
#' removes it. `augment_sql()` adds predictions to a table or query of dbplyr, lazily: nothing is
#' computed before rows are requested. `to_sql()` only returns the SQL.
#'
#' @details
#' Models of `keras_model_sequential()` and `keras_model()` can be translated to SQL if their layers
#' are among dense, convolution, pooling, normalization, embedding, recurrent and merging layers.
#' For any other layer, an error names it before anything is written. Numbers are float32 or better,
#' and are summed in a different order than in Keras: expect differences of about 1e-6. A row with a
#' feature that is missing, not a number, infinite or too large for float32 has no prediction. Text
#' and factors are encoded as in the training of a fit, and a value that was not in the training has
#' no prediction. Any other column that does not hold numbers raises an error with its name. In
#' PostgreSQL, for the SQL of `to_sql()`, cast booleans and vectors of pgvector to numbers in a
#' view.
#'
#' The features of a formula or a recipe are computed in SQL, too, with the numbers and levels of
#' the training: arithmetic, logarithms, powers, `scale()`, conditions, factors and interactions of
#' a formula; the steps of a recipe that the package orbital translates. Parts that cannot be
#' translated are named in an error. Before anything is created, up to 50 rows of the table are
#' compared with R's results for them, and a difference is an error. For this, `to_sql()` needs a
#' connection, not only a dialect.
#'
#' A deployment happens in one transaction, in which the database computes predictions that are
#' compared with those of Keras. If anything fails, nothing remains. (Spark has no transactions:
#' what was created is dropped again.) Another deployment of the same name is the next version: the
#' view `name` shows the newest one, and the views `name_v1`, `name_v2` and so on stay. The table
#' `tfdist_models` records each deployment and its time.
#'
#' SQLite needs mathematical functions. RSQLite has them in an extension, which is loaded here.
#' Another session that reads the view must first call `RSQLite::initExtension(con, "math")`.
#'
#' The predictions are the columns `.pred_class`, and `.pred_<level>` with the probability of each
#' class; or `.pred`, or `.pred_<output>` for each of several outputs, with the model's numbers. If
#' the model's loss is one of Keras's with `from_logits`, SQL computes the softmax or sigmoid, too.
#' If the numbers are not probabilities, there is no `.pred_<level>`.
#'
#' `augment_sql()` writes the model's weights to a temporary table of the connection. The table, and
#' so the query, exist only as long as the connection.
#'
#' @param model A [tfdist_fit] or a Keras model.
#' @param con A DBI connection to DuckDB, PostgreSQL or SQLite, outside of a transaction, or a
#'   sparklyr connection.
#' @param dialect A connection, or one of `"duckdb"`, `"postgresql"`, `"sqlite"`, `"spark"` and
#'   `"oracle"` (whose text no test has run in Oracle).
#' @param name Name of the view.
#' @param table Table of the rows; with a schema, `c("schema", "table")`, or an object of DBI or
#'   dbplyr: `DBI::Id()`, `dbplyr::in_schema()`, `dplyr::tbl()`.
#' @param key Columns to show with the predictions.
#' @param features The model's column of arrays (SQLite: of JSON text); or a column for each number;
#'   or a named list of either for several inputs. `NULL` (default): those of the training.
#' @param type `"class"`, `"prob"`, `"raw"`, or `NULL` (default) to choose by the model, as in
#'   [predict.tfdist_fit()].
#' @param levels Names of the classes. `NULL` (default): those of the training, or else their
#'   numbers.
#' @param weights Name of the table of weights that the query reads.
#' @param version Version to remove. `NULL` (default): all versions.
#' @param x A table or query of dbplyr. The result has the same groups.
#'
#' @return `deploy_model()`: a list of the `name`, the `version`, the names of the version's own
#'   `view` and of its table of `weights`, and the largest `difference` between numbers of the
#'   database and of Keras. `undeploy_model()`: `name`, invisibly. `augment_sql()`: a query of
#'   dbplyr, with all columns of `x` and the predictions. `to_sql()`: a list of the `dialect`, the
#'   `query`, and the name and `rows` of the table of `weights`.
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
  check_string(name)
  call <- rlang::current_env()
  database <- open_database(con, "con", call)
  asked <- check_question(
    model,
    check_table_name(table, con, call),
    key,
    features,
    type,
    levels,
    call,
    con
  )
  made <- call_python(
    pybackend(call)$deploy_model,
    database,
    asked$model,
    name,
    table = asked$table,
    key = asked$key,
    features = asked$features,
    type = type,
    levels = asked$levels,
    categories = asked$categories,
    encode = asked$encode,
    call = call
  )
  list(
    name = made$name,
    version = made$version,
    view = made$view,
    weights = made$weights,
    difference = made$difference
  )
}

#' @rdname deploy_model
#' @export
undeploy_model <- function(con, name, version = NULL) {
  check_string(name)
  version <- check_count(version, allow_null = TRUE)
  call <- rlang::current_env()
  database <- open_database(con, "con", call)
  call_python(pybackend(call)$undeploy_model, database, name, version = version, call = call)
  invisible(name)
}

#' @rdname deploy_model
#' @export
augment_sql <- function(x, model, features = NULL, type = NULL, levels = NULL) {
  check_installed("dplyr", "A query", rlang::current_env())
  check_installed("dbplyr", "A query", rlang::current_env())
  if (!inherits(x, "tbl_lazy")) {
    abort_input("`x` must be a table or query of dbplyr, such as `dplyr::tbl(con, \"rows\")`.")
  }
  call <- rlang::current_env()
  con <- dbplyr::remote_con(x)
  database <- open_database(con, "x", call)
  columns <- colnames(x)
  asked <- check_question(model, list("rows"), columns, features, type, levels, call, rows = x)
  query <- call_python(
    pybackend(call)$bridge$augment,
    database,
    asked$model,
    asked$sql %||% as.character(dbplyr::remote_query(x)),
    asked$key,
    columns = as.list(c(columns, if (!is.null(asked$sql)) unlist(asked$features))),
    features = asked$features,
    type = type,
    levels = asked$levels,
    categories = asked$categories,
    encode = asked$encode,
    call = call
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
  call <- rlang::current_env()
  check_string(weights)
  table <- check_table_name(table, dialect, call)
  con <- if (!rlang::is_string(dialect)) dialect
  if (is.null(con)) {
    known <- c("duckdb", "postgresql", "sqlite", "spark", "oracle")
    check_one_of(dialect, known, call = call)
  } else {
    dialect <- find_dialect(dialect, "dialect", call)
  }
  asked <- check_question(model, table, key, features, type, levels, call, con)
  made <- call_python(
    pybackend(call)$to_sql,
    asked$model,
    dialect,
    table = asked$table,
    key = asked$key,
    features = asked$features,
    type = type,
    levels = asked$levels,
    categories = asked$categories,
    encode = asked$encode,
    weights = weights,
    call = call
  )
  described <- pybackend(call)$bridge$describe_sql(made)
  rows <- data.frame(part = as.character(described$part), place = as.integer(described$place))
  rows$numbers <- lapply(described$numbers, as.numeric)
  list(dialect = dialect, query = described$query, weights = weights, rows = rows)
}

# The arguments that define the computation, as Python takes them. The computations of a formula or
# a recipe become a query of `rows`, or of the connection's table.
check_question <- function(
  model,
  table,
  key,
  features,
  type,
  levels,
  call,
  con = NULL,
  rows = NULL
) {
  is_fit <- inherits(model, "tfdist_fit")
  prepared <- NULL
  if (!is_fit) {
    check_model_object(model, call = call)
  }
  key <- check_strings(key, call = call)
  features <- check_features(features, call = call)
  check_one_of(type, c("class", "prob", "raw"), allow_null = TRUE, call = call)
  levels <- check_strings(levels, allow_null = TRUE, call = call)
  if (is_fit && is.null(features)) {
    if (!is.null(model$preparation)) {
      rows <- rows %||% open_rows(con, table, call)
      prepared <- prepare_query(rows, key, model, call)
    }
    if (any(names(model$tensors) %in% unlist(model$features))) {
      abort_input(
        c(
          "`features` is needed: training read columns with `tensors`, which SQL cannot.",
          i = "Pass a column of arrays of numbers."
        ),
        call = call
      )
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
  } else {
    categories <- encode <- NULL
  }
  if (is.null(features)) {
    abort_input("`features` is needed: the columns that make up the model's input.", call = call)
  }
  known <- if (is_fit) model$levels
  keras_model <- if (is_fit) fit_model(model, call) else model
  pick <- pybackend(call)$bridge$pick_columns
  named <- is.list(features)
  list(
    model = keras_model,
    table = if (is.null(prepared)) table else pybackend(call)$bridge$SourceQuery(prepared$sql),
    sql = prepared$sql,
    key = as.list(key),
    features = if (named) {
      lapply(features, column_or_list)
    } else {
      pick(keras_model, as.list(features))
    },
    levels = as_list_or_null(levels) %||% model_levels(keras_model, known, call),
    categories = null_if_empty(lapply(categories, as.list)),
    encode = null_if_empty(as.list(encode))
  )
}

open_rows <- function(con, table, call) {
  if (is.null(con)) {
    abort_input(
      c(
        "A formula or a recipe computed the features of the training in R.",
        i = "Pass a connection as `dialect` to translate it to SQL.",
        i = "Or compute the columns in the database, and pass their names as `features`."
      ),
      call = call
    )
  }
  check_installed("dplyr", "A formula or a recipe in SQL", call)
  quoted <- DBI::dbQuoteIdentifier(con, DBI::Id(unlist(table)))
  tryCatch(
    dplyr::tbl(con, dplyr::sql(paste("SELECT * FROM", quoted))),
    error = function(error) {
      abort_input(
        c(sprintf("`table` cannot be read: %s.", quoted), x = last_message(error)),
        call = call
      )
    }
  )
}

column_or_list <- function(names) if (length(names) == 1L) names[[1L]] else as.list(names)

as_list_or_null <- function(x) if (!is.null(x)) as.list(x)
