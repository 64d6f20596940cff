# The database object for Python: a Spark session, or R functions that use the connection.
open_database <- function(con, arg) {
  if (inherits(con, "spark_connection")) {
    return(open_session(check_sc(con, arg)))
  }
  dialect <- find_dialect(con, arg)
  check_installed("DBI", "A database")
  # dbIsValid() fails for the connections that dbplyr simulates.
  if (!isTRUE(tryCatch(DBI::dbIsValid(con), error = function(error) FALSE))) {
    problem <- sprintf("The connection of `%s` is not open.", arg)
    abort_input(problem, i = "Connect again with `DBI::dbConnect()`.")
  }
  if (dialect == "sqlite") {
    load_functions(con)
  }
  pybackend()$bridge$connect_dbi(
    dialect,
    function(sql, values, has_rows) run_statement(con, sql, values, has_rows),
    function(name, columns, values) write_temporary(con, name, columns, values),
    function() is_transacting(con)
  )
}

is_transacting <- function(con) {
  if (inherits(con, "PqConnection")) {
    # In a transaction, now() does not change.
    now <- function() DBI::dbGetQuery(con, "SELECT CAST(now() AS text)")[[1L]]
    return(now() == now())
  }
  # The others raise an error for a transaction within another.
  begun <- try(DBI::dbBegin(con), silent = TRUE)
  if (inherits(begun, "try-error")) {
    return(TRUE)
  }
  DBI::dbRollback(con)
  FALSE
}

# The SQLite of RSQLite has no mathematical functions before its own extension is loaded.
load_functions <- function(con) {
  has_none <- inherits(try(DBI::dbGetQuery(con, "SELECT exp(1.0)"), silent = TRUE), "try-error")
  if (has_none && requireNamespace("RSQLite", quietly = TRUE)) {
    RSQLite::initExtension(con, "math")
  }
}

find_dialect <- function(con, arg) {
  classes <- c(
    duckdb_connection = "duckdb",
    PqConnection = "postgresql",
    SQLiteConnection = "sqlite",
    spark_connection = "spark"
  )
  known <- classes[names(classes) %in% class(con)]
  if (!length(known)) {
    hint <- if (inherits(con, "Pool")) {
      "Take a connection from the pool, such as with `pool::localCheckout()`."
    } else if (is.character(con)) {
      "Connect with `DBI::dbConnect()`."
    }
    expected <- "a connection to DuckDB, PostgreSQL, SQLite or Spark"
    check_fits(con, FALSE, expected, FALSE, arg, hint)
  }
  known[[1L]]
}

run_statement <- function(con, sql, values, has_rows) {
  # Transactions must be begun with DBI: dbWriteTable() would end one that DBI does not know of.
  control <- list(BEGIN = DBI::dbBegin, COMMIT = DBI::dbCommit, ROLLBACK = DBI::dbRollback)[[sql]]
  if (!is.null(control)) {
    control(con)
    return(NULL)
  }
  params <- null_if_empty(unname(lapply(values, function(value) value %||% NA)))
  if (has_rows) {
    return(unname(lapply(DBI::dbGetQuery(con, sql, params = params), as.list)))
  }
  DBI::dbExecute(con, sql, params = params)
  NULL
}

write_temporary <- function(con, name, columns, values) {
  frame <- as.data.frame(lapply(values, function(column) as.vector(unlist(column))))
  names(frame) <- columns
  DBI::dbWriteTable(con, name, frame, temporary = TRUE)
  NULL
}

# Parts of a table's name, from any form in which DBI and dbplyr have it.
check_table_name <- function(table, con) {
  if (inherits(table, "Id")) {
    return(as.list(unname(table@name)))
  }
  if (inherits(table, c("dbplyr_schema", "dbplyr_catalog"))) {
    parts <- unclass(table)[c("catalog", "schema", "table")]
    return(lapply(unname(parts[lengths(parts) > 0L]), as.character))
  }
  if (inherits(table, "tbl_lazy")) {
    advice <- "Create a view of it, or add predictions to it with `augment_sql()`."
    unquote_table(dbplyr::remote_table(table), dbplyr::remote_con(table)) %||%
      abort_input("`table` is a query, not a table of the database.", i = advice)
  } else if (inherits(table, c("AsIs", "ident_q", "sql"))) {
    unquote_table(table, con) %||%
      abort_input("`table` is SQL: pass a name, such as `c(\"schema\", \"table\")`.")
  } else {
    as.list(as.character(check_strings(table, arg = "table")))
  }
}

# Parts of a quoted name. NULL if it is not a name, or if there is no connection.
unquote_table <- function(quoted, con) {
  quoted <- as.character(unclass(quoted))
  can_unquote <- length(quoted) && inherits(con, "DBIConnection")
  if (!can_unquote || grepl("^\\s*(SELECT|WITH)\\s", quoted)) {
    return(NULL)
  }
  if (inherits(con, "spark_connection")) {
    # DBI does not know its backticks.
    parts <- regmatches(quoted, gregexpr("`[^`]+`|[^`.]+", quoted))[[1L]]
    return(as.list(gsub("`", "", parts)))
  }
  name <- try(DBI::dbUnquoteIdentifier(con, DBI::SQL(quoted))[[1L]]@name, silent = TRUE)
  if (is.character(name) && !inherits(name, "try-error")) as.list(unname(name))
}
