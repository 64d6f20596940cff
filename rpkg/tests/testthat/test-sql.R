features <- names(iris)[1:4]
# Without it R asks systemd for the time zone, which is missing in containers.
withr::local_envvar(TZ = "UTC", .local_envir = teardown_env())

connections <- list(
  duckdb = function() DBI::dbConnect(duckdb::duckdb(shared_home = FALSE)),
  sqlite = function() DBI::dbConnect(RSQLite::SQLite(), ":memory:"),
  postgresql = function() {
    if (!nzchar(Sys.getenv("PGHOST"))) {
      skip_or_fail("no server of PostgreSQL is running")
    }
    con <- DBI::dbConnect(RPostgres::Postgres())
    # Tables of a test belong to the connection and are removed with it.
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
        "in a transaction",
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
      # The weights already exist.
      before <- DBI::dbListTables(con)
      augment_sql(rows, model, features, type = "class")
      expect_setequal(DBI::dbListTables(con), before)
      grouped <- augment_sql(dplyr::group_by(rows, id), model, features)
      expect_equal(dplyr::group_vars(grouped), "id")
      named <- dplyr::mutate(rows, Species = "setosa")
      expect_error(
        augment_sql(named, model, c(features[1:3], "Species")),
        '"Species", which has type',
        class = "tfdist_error_input"
      )
      expect_error(augment_sql(dplyr::select(rows, id), model, features), 'it has "id"')
    })
  })
}

cars <- transform(
  mtcars,
  id = seq_len(32),
  gear = as.character(gear),
  cyl = as.integer(cyl),
  carb = as.integer(carb),
  row.names = NULL
)
computing <- mpg ~ log(disp) +
  scale(hp) +
  I(wt^2) +
  cyl:carb +
  gear * qsec +
  I(drat > 3.5) +
  I(carb / 2) +
  log1p(am) +
  factor(vs)

regression <- function(inputs) {
  keras <- reticulate::import("keras")
  layers <- list(
    keras$Input(reticulate::tuple(inputs)),
    keras$layers$Dense(3L, activation = "tanh"),
    keras$layers$Dense(1L)
  )
  model <- keras$Sequential(layers)
  model$compile("sgd", "mse")
  model
}

# With rows that have an unknown value, no logarithm, or a missing number.
cars_and_others <- function() {
  rbind(
    cars,
    transform(cars[1, ], id = 33L, gear = "9"),
    transform(cars[2, ], id = 34L, disp = 0),
    transform(cars[3, ], id = 35L, hp = NA)
  )
}

check_scores <- function(con, fit, missing) {
  rows <- cars_and_others()
  if (!DBI::dbExistsTable(con, "cars")) {
    DBI::dbWriteTable(con, "cars", rows)
  }
  expect_lt(deploy_model(con, fit, "scores", "cars", "id")$difference, 1e-4)
  found <- DBI::dbGetQuery(con, "SELECT * FROM scores ORDER BY id")
  expected <- suppressWarnings(predict(fit, rows))
  expect_identical(which(is.na(found$.pred)), missing)
  is_there <- setdiff(seq_len(nrow(rows)), missing)
  expect_equal(found$.pred[is_there], expected$.pred[is_there], tolerance = 1e-5)
  some <- dplyr::filter(dplyr::tbl(con, "cars"), id > 30)
  scored <- dplyr::collect(dplyr::arrange(augment_sql(some, fit), id))
  expect_named(scored, c(names(cars), ".pred"))
  expect_equal(scored$disp, rows$disp[31:35])
  expect_equal(scored$.pred, found$.pred[31:35])
}

test_full("what a formula or a recipe computes becomes SQL, with the numbers of the training", {
  skip_if_no_pybackend()
  train <- function(inputs, formula) {
    arguments <- list("local", regression(inputs), cars, formula, workers = 1, seed = 1)
    suppressMessages(do.call(barrier_train, c(arguments, verbose = 0)))
  }
  by_formula <- train(16L, computing)
  skip_if_not_installed("recipes")
  skip_if_not_installed("orbital")
  recipe <- recipes::recipe(mpg ~ disp + hp + gear + drat, data = cars)
  recipe <- recipes::step_impute_median(recipe, hp)
  recipe <- recipes::step_normalize(recipe, recipes::all_numeric_predictors())
  by_recipe <- train(6L, recipes::step_dummy(recipe, gear, one_hot = TRUE))
  # The last step is tfdist's own: text among numbers becomes one-hot.
  ends_in_text <- train(6L, recipe)
  for (kind in names(connections)) {
    con <- connections[[kind]]()
    check_scores(con, by_formula, 33:35)
    if (kind == "duckdb") {
      check_scores(con, by_recipe, 33L)
      check_scores(con, ends_in_text, 33L)
    }
    written <- to_sql(by_formula, con, "cars", "id")
    expect_match(written$query, "LN|LOG", ignore.case = TRUE)
    close_connection(con)
  }
  expect_snapshot(error = TRUE, {
    to_sql(by_formula, "duckdb", "cars", "id")
  })
})

test_that("expressions of a formula give the columns of model.matrix()", {
  skip_if_not_installed("dplyr")
  formulas <- list(
    computing,
    mpg ~ disp * hp * gear,
    mpg ~ gear:factor(cyl) + I(disp - hp / 2),
    mpg ~ scale(disp, scale = FALSE) + scale(hp, center = 100) + sqrt(wt) + log10(hp) + log2(hp),
    mpg ~ I(pmax(disp, hp)) +
      abs(qsec - 18) +
      I((wt + 1)^3) +
      exp(drat) +
      I(ifelse(am > 0, hp, wt)),
    mpg ~ I(gear %in% c("3", "4") & disp > 100) + I(!(am == 1)) + I(-wt) + floor(wt),
    mpg ~ heavy:disp + I(hp > 100):wt
  )
  cars$heavy <- cars$wt > 3
  for (formula in formulas) {
    preparation <- formula_columns(formula, cars, NULL, NULL)$preparation
    expected <- apply_formula(preparation, cars, "data", FALSE, keeps_missing = TRUE)
    expressions <- formula_expressions(preparation)
    found <- as.data.frame(dplyr::transmute(cars, !!!expressions), optional = TRUE)
    expect_identical(names(found), names(expected))
    expect_equal(unname(as.list(found)), unname(as.list(expected)))
  }
})

test_that("what cannot become SQL is named", {
  skip_if_not_installed("dplyr")
  translate <- function(formula) {
    formula_expressions(formula_columns(formula, cars, NULL, NULL)$preparation)
  }
  expect_snapshot(error = TRUE, {
    translate(mpg ~ poly(disp, 2) + hp)
    translate(mpg ~ log(disp) + cut(hp, c(0, 100, 400)))
    translate(mpg ~ I(disp^0.5))
    translate(mpg ~ I(nchar(gear)))
    translate(mpg ~ I(round(disp, digits = 1)))
  })
})

test_that("a database that computes something else than R is noticed", {
  preparation <- formula_columns(mpg ~ log(disp) + hp, cars, NULL, NULL)$preparation
  fit <- list(preparation = preparation, features = c("log(disp)", "hp"))
  rows <- data.frame(disp = c(1, 2), hp = 3:4, .feature_1 = log(c(1, 2)), .feature_2 = c(3, 5))
  names <- c("log(disp)" = ".feature_1", hp = ".feature_2")
  expect_snapshot(error = TRUE, check_prepared(rows, c("disp", "hp"), names, fit))
  rows$.feature_2 <- c(3, 4)
  expect_null(check_prepared(rows, c("disp", "hp"), names, fit))
})

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
    "with `tensors`",
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
    expect_error(augment_sql(dplyr::tbl(con, "flowers"), model, absent), '"absent"', class = input)
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
