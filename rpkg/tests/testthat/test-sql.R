features <- names(iris)[1:4]
# Without it R asks systemd for the time zone, which containers do not have.
withr::local_envvar(TZ = "UTC", .local_envir = teardown_env())

connections <- list(
  duckdb = function() DBI::dbConnect(duckdb::duckdb(shared_home = FALSE)),
  sqlite = function() DBI::dbConnect(RSQLite::SQLite(), ":memory:"),
  postgresql = function() {
    if (!nzchar(Sys.getenv("PGHOST"))) {
      skip_or_fail("no server of PostgreSQL is running")
    }
    con <- DBI::dbConnect(RPostgres::Postgres())
    # What a test makes there is the connection's own, and gone with it.
    DBI::dbExecute(con, "CREATE SCHEMA rtest")
    DBI::dbExecute(con, "SET search_path TO rtest")
    con
  }
)

close_connection <- function(con) {
  if (inherits(con, "PqConnection")) {
    DBI::dbExecute(con, "SET client_min_messages = warning")
    DBI::dbExecute(con, "DROP SCHEMA rtest CASCADE")
  }
  DBI::dbDisconnect(con)
}

with_flowers <- function(kind, code) {
  skip_if_no_pybackend()
  con <- connections[[kind]]()
  on.exit(close_connection(con))
  DBI::dbWriteTable(con, "flowers", data.frame(id = seq_len(150), iris[1:4], check.names = FALSE))
  code(con)
}

list_tables <- function(con) setdiff(DBI::dbListTables(con), "flowers")

for (kind in names(connections)) {
  test_that(sprintf("a model is deployed into %s, and taken away", kind), {
    with_flowers(kind, function(con) {
      model <- dense_model()
      expected <- softmax(model$predict(as.matrix(iris[1:4]), verbose = 0L))
      made <- deploy_model(
        con,
        model,
        "flower scores",
        "flowers",
        "id",
        features,
        levels = levels(iris$Species)
      )
      expect_equal(made$version, 1L)
      expect_lt(made$difference, 1e-4)
      found <- DBI::dbGetQuery(con, 'SELECT * FROM "flower scores" ORDER BY id')
      expect_named(found, c("id", ".pred_class", paste0(".pred_", levels(iris$Species))))
      expect_equal(unname(as.matrix(found[3:5])), expected, tolerance = 1e-4)
      expect_equal(found$.pred_class, levels(iris$Species)[max.col(expected)])

      before <- list_tables(con)
      expect_error(
        deploy_model(con, model, "flower scores", "absent", "id", features),
        "`table` cannot be read: .*absent",
        class = "tfdist_error_input"
      )
      expect_setequal(list_tables(con), before)
      DBI::dbBegin(con)
      expect_error(
        deploy_model(con, model, "other", "flowers", "id", features),
        "within a transaction",
        class = "tfdist_error_input"
      )
      DBI::dbRollback(con)

      undeploy_model(con, "flower scores")
      expect_equal(list_tables(con), "tfdist_models")
      expect_error(undeploy_model(con, "flower scores"), class = "tfdist_error_input")
    })
  })

  test_that(sprintf("predictions join a query of %s, lazily", kind), {
    with_flowers(kind, function(con) {
      model <- dense_model()
      expected <- softmax(model$predict(as.matrix(iris[c(3, 80, 120), 1:4]), verbose = 0L))
      rows <- dplyr::filter(dplyr::tbl(con, "flowers"), id %in% c(3L, 80L, 120L))
      scored <- augment_sql(rows, model, features, levels = levels(iris$Species))
      expect_s3_class(scored, "tbl_lazy")
      found <- dplyr::collect(dplyr::arrange(scored, id))
      expect_equal(unname(as.matrix(found[7:9])), expected, tolerance = 1e-4)
      counted <- dplyr::collect(dplyr::count(scored, .pred_class))
      expect_equal(sum(as.integer(counted$n)), 3L)
      # The weights are there already.
      before <- DBI::dbListTables(con)
      augment_sql(rows, model, features, type = "class")
      expect_setequal(DBI::dbListTables(con), before)
      grouped <- augment_sql(dplyr::group_by(rows, id), model, features)
      expect_equal(dplyr::group_vars(grouped), "id")
      named <- dplyr::mutate(rows, Species = "setosa")
      expect_error(
        augment_sql(named, model, c(features[1:3], "Species")),
        "'Species', which is of the type",
        class = "tfdist_error_input"
      )
      expect_error(augment_sql(dplyr::select(rows, id), model, features), "it has 'id'")
    })
  })
}

test_that("a fit knows its features and its levels", {
  with_flowers("duckdb", function(con) {
    fit <- train_flowers(iris, epochs = 1)
    deploy_model(con, fit, "scores", "flowers", "id")
    found <- DBI::dbGetQuery(con, "SELECT * FROM scores ORDER BY id")
    expected <- fit$model$predict(as.matrix(iris[1:4]), verbose = 0L)
    expect_equal(found$.pred_class, levels(iris$Species)[max.col(expected)])
    written <- to_sql(fit, con, "flowers", "id", weights = "w")
    expect_equal(written$dialect, "duckdb")
    expect_match(written$query, '"w"', fixed = TRUE)
    expect_named(written$rows, c("part", "place", "numbers"))
  })
})

test_that("a single logit has two levels, and the categories of a label are no features", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  model <- dense_model(units = 1L)
  model$compile(loss = keras$losses$BinaryCrossentropy(from_logits = TRUE))
  fit <- example_fit(levels = c("no", "yes"))
  fit$decoded <- rlang::env(model = model)
  fit[c("features", "categories")] <- list(features, list(kind = c("no", "yes")))
  query <- to_sql(fit, "duckdb", "flowers", "id")$query
  expect_match(query, '".pred_yes"', fixed = TRUE)
  fit$tensors <- rlang::set_names(list("float32"), features[[2]])
  expect_error(
    to_sql(fit, "duckdb", "flowers", "id"),
    "by `tensors`",
    class = "tfdist_error_input"
  )
})

test_that("factors are encoded as predict() encodes them", {
  with_flowers("duckdb", function(con) {
    fit <- example_fit(levels = c("no", "yes", "perhaps"))
    fit$decoded <- rlang::env(model = dense_model(4L))
    fit$features <- c("size", "town", "grade")
    fit$categories <- list(town = c("o'slo", "rome"), grade = c("low", "high"), kind = "no")
    fit$encode <- list(town = "one_hot", grade = "integer")
    rows <- data.frame(
      id = 1:5,
      size = c(0.5, -1, 1, NA, 2),
      town = c("o'slo", "rome", "paris", "rome", NA),
      grade = c("high", "low", "low", "high", "low")
    )
    DBI::dbWriteTable(con, "people", rows)
    deploy_model(con, fit, "scores", "people", "id")
    found <- DBI::dbGetQuery(con, "SELECT * FROM scores ORDER BY id")
    expected <- as.data.frame(predict(fit, rows))
    expected$.pred_class <- as.character(expected$.pred_class)
    expect_equal(found[-1L], expected, tolerance = 1e-5)
    augmented <- dplyr::collect(augment_sql(dplyr::tbl(con, "people"), fit))
    expect_equal(augmented$.pred_class, expected$.pred_class)
  })
})

test_that("tables are named as DBI and dbplyr name them", {
  with_flowers("duckdb", function(con) {
    DBI::dbExecute(con, "CREATE SCHEMA lab")
    DBI::dbExecute(con, 'CREATE TABLE lab."my flowers" AS SELECT * FROM flowers')
    named <- list(
      c("lab", "my flowers"),
      DBI::Id("lab", "my flowers"),
      dbplyr::in_schema("lab", "my flowers"),
      I('lab."my flowers"'),
      dplyr::tbl(con, DBI::Id("lab", "my flowers"))
    )
    queries <- lapply(named, function(table) {
      to_sql(dense_model(), con, table, "id", features)$query
    })
    expect_match(queries[[1]], 'FROM "lab"."my flowers"', fixed = TRUE)
    expect_identical(queries, rep(queries[1], length(named)))
    query <- dplyr::filter(dplyr::tbl(con, "flowers"), id == 1)
    for (table in list(query, dplyr::sql("SELECT * FROM flowers"))) {
      expect_error(
        deploy_model(con, dense_model(), "x", table, "id", features),
        "is a query|is SQL",
        class = "tfdist_error_input"
      )
    }
  })
})

test_that("wrong arguments are named before anything is made", {
  with_flowers("duckdb", function(con) {
    model <- dense_model()
    input <- "tfdist_error_input"
    expect_error(deploy_model(con, model, 3, "flowers", "id", features), "name", class = input)
    expect_error(deploy_model(con, "model", "x", "flowers", "id", features), "model", class = input)
    expect_error(deploy_model(con, model, "x", "flowers", "id"), "features", class = input)
    expect_error(deploy_model(1, model, "x", "flowers", "id", features), "DuckDB", class = input)
    expect_error(deploy_model("db", model, "x", "flowers", "id"), "dbConnect", class = input)
    absent <- replace(features, 2, "absent")
    expect_error(augment_sql(dplyr::tbl(con, "flowers"), model, absent), "'absent'", class = input)
    expect_error(to_sql(model, "mysql", "flowers", "id", features), "duckdb", class = input)
    expect_error(augment_sql(iris, model, features), "dbplyr", class = input)
    expect_error(undeploy_model(con, "x", version = 0), "version", class = input)
    closed <- DBI::dbConnect(RSQLite::SQLite())
    DBI::dbDisconnect(closed)
    expect_error(undeploy_model(closed, "x"), "not open", class = input)
    expect_error(undeploy_model("duckdb", "x"), "must be a connection", class = input)
    pool <- structure(list(), class = c("Pool", "R6"))
    expect_error(undeploy_model(pool, "x"), "localCheckout", class = input)
    expect_equal(list_tables(con), character())
  })
})
