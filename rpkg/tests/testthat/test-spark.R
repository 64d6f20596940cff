rows <- stats::setNames(iris, c("a", "b", "c", "d", "label"))
rows$label <- as.integer(rows$label) - 1L

train <- function(sc, data, ..., verbose = 0) {
  model <- dense_model()
  barrier_train(sc, model, data, ..., workers = 2, epochs = 2, seed = 1, verbose = verbose)
}

test_that("a wrong `sc` is answered with the possible values", {
  expect_snapshot(error = TRUE, {
    check_sc("yarn", arg = "sc")
    check_sc(4, arg = "sc")
    check_sc(list(), arg = "sc")
  })
})

test_that("local routes need no Spark", {
  for (sc in list(NULL, "local", "local[4]", "local[*]")) {
    expect_identical(check_sc(sc)$kind, "local")
  }
})

test_that("Python objects other than sessions are rejected", {
  skip_if_no_pybackend()
  expect_error(check_sc(reticulate::import("sys")), class = "tfdist_error_input")
})

test_that("the executors' Python: the environment, Spark's setting, reticulate's", {
  withr::local_envvar(PYSPARK_PYTHON = "/a/python")
  expect_identical(executor_python(list(python = "/b/python")), "/a/python")
  withr::local_envvar(PYSPARK_PYTHON = NA)
  expect_identical(executor_python(list(python = "/b/python")), "/b/python")
})

test_that("a local connection trains as this machine does", {
  sc <- file_connection("local[2]")
  route <- check_sc(sc)
  expect_identical(route$kind, "sparklyr")

  here <- train("local", iris_arrays())
  spark <- train(sc, iris_arrays())
  expect_equal(fit_weights(spark), fit_weights(here), tolerance = 1e-6)
  expect_identical(sum(spark$workers$rows), 150L)

  # The session is reused, and its Python object can be `sc`, too.
  session <- open_session(route)
  expect_s3_class(session, "python.builtin.object")
  expect_identical(check_sc(session)$kind, "python")
  expect_identical(
    session$sparkContext$applicationId,
    sparklyr::invoke(sparklyr::spark_context(sc), "applicationId")
  )

  # A PySpark DataFrame can be `data`, too; the fit stores its columns.
  frame <- session$createDataFrame(
    reticulate::r_to_py(data.frame(a = runif(40), b = runif(40), label = rep(0:1, 20)))
  )
  from_frame <- barrier_train(session, dense_model(2L), frame, workers = 1, verbose = 0)
  expect_identical(from_frame$features, c("a", "b"))
  expect_identical(dim(predict(from_frame, data.frame(b = 1, a = 2))), c(1L, 4L))

  # A table reaches the workers through a view that is removed afterwards.
  before <- list_views(session)
  table <- sparklyr::sdf_copy_to(sc, rows, "iris_rows", overwrite = TRUE)
  from_table <- train(sc, table)
  expect_identical(sum(from_table$workers$rows), 150L)
  expect_identical(dim(predict(from_table, rows[1:5, ])), c(5L, 4L))
  expect_scored_as_here(sc, session, from_table, table, rows, before)

  expect_error(train(sc, table, label = "kind"), class = "tfdist_error_input")

  end_shared_connection()
  expect_snapshot(error = TRUE, check_sc(sc, arg = "sc"))
})

test_full("a second connection trains beside the first, and after it", {
  first <- file_connection("local[2]")
  withr::local_dir(withr::local_tempdir())
  config <- test_config()
  second <- sparklyr::spark_connect("local[1]", app_name = "second", config = config)
  on.exit(sparklyr::spark_disconnect(second))
  application <- function(sc) open_session(check_sc(sc))$sparkContext$applicationId

  for (sc in list(first, second, first)) {
    expect_identical(application(sc), application_id(sc))
  }
  table <- sparklyr::sdf_copy_to(second, rows, "iris_rows")
  fit <- barrier_train(second, dense_model(), table, workers = 1, verbose = 0)
  sparklyr::spark_disconnect(first)
  expect_identical(application(second), application_id(second))
  expect_identical(sparklyr::sdf_nrow(predict(fit, table)), 150)
})

test_full("text as the label, weights of rows, and a SQL query, to which dplyr verbs are added", {
  sc <- file_connection("local[2]")
  rows$kind <- as.character(iris$Species)
  rows$n <- rep(c(1, 2), 75)
  sparklyr::sdf_copy_to(sc, rows, "iris_kinds", overwrite = TRUE)
  kinds <- dplyr::tbl(sc, dplyr::sql("SELECT a, b, c, d, n, kind FROM iris_kinds"))
  few <- dplyr::filter(kinds, a > 4.4 | kind != "setosa")
  expect_message(
    by_kind <- train(sc, few, label = "kind", weight = "n", verbose = 1),
    "setosa = 0"
  )
  expect_identical(sum(by_kind$workers$rows), sum(rows$a > 4.4 | rows$kind != "setosa"))
  expect_identical(by_kind$levels, levels(iris$Species))
  expect_identical(by_kind$features, c("a", "b", "c", "d"))
  expect_identical(levels(predict(by_kind, rows[1:2, ])$.pred_class), by_kind$levels)
  # Rows with only some of the classes have the codes of the training, as text and as numbers.
  last <- barrier_evaluate(sc, by_kind, dplyr::filter(kinds, kind != "setosa"), label = "kind")
  coded <- sparklyr::sdf_copy_to(sc, rows[rows$label > 0, 1:5], "iris_codes", overwrite = TRUE)
  expect_equal(last, barrier_evaluate(sc, by_kind, coded), tolerance = 1e-5)
})
