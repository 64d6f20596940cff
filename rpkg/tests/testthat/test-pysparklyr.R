# Outside of the tests, so that the start of the server does not count as a test's time.
sc <- if (runs_full()) file_pyspark_connection()

rows <- iris
names(rows) <- c("a", "b", "c", "d", "label")
rows$label <- as.integer(rows$label) - 1L
train <- function(sc, data, ...) {
  barrier_train(sc, dense_model(), data, ..., workers = 2, epochs = 2, seed = 1, verbose = 0)
}
# One step with all rows in an epoch, so that the order of Spark's rows does not matter.
whole <- function(sc, data, ...) train(sc, data, batch_size = 150L, ...)

test_full("a dplyr pipeline trains, and the failure of a callback has its reason", {
  table <- dplyr::copy_to(sc, rows, "iris_pipeline", overwrite = TRUE)
  # Any dplyr pipeline can be a table.
  pipeline <- dplyr::mutate(dplyr::filter(table, label < 2L), a = a * 2)
  kept <- transform(rows[rows$label < 2L, ], a = a * 2)
  expect_equal(
    fit_weights(whole(sc, pipeline, validation_data = table)),
    fit_weights(whole("local", kept)),
    tolerance = 1e-6
  )

  main <- reticulate::py_run_string(paste(
    "import keras",
    "class FailingOnConnect(keras.callbacks.Callback):",
    "    def on_train_begin(self, logs=None):",
    "        raise RuntimeError('the callback failed')",
    sep = "\n"
  ))
  condition <- tryCatch(
    train(sc, iris_arrays(), callbacks = list(main$FailingOnConnect())),
    tfdist_error = identity
  )
  expect_s3_class(condition, "tfdist_error_worker_failed")
  expect_identical(condition$exception_type, "RuntimeError")
  expect_type(condition$rank, "integer")
  expect_match(conditionMessage(condition), "the callback failed")
  expect_match(condition$traceback, "the callback failed")
  sparklyr::spark_session(sc)$catalog$dropTempView("iris_pipeline")
})

test_full("a connection of pysparklyr trains as this machine does", {
  route <- check_sc(sc)
  expect_identical(route$kind, "pysparklyr")

  # The job of all routes: with a model of this session, and with one built by R.
  expect_scenario(scenario_train(sc, model = scenario()$build()))
  expect_scenario(scenario_train(sc, model_fn = scenario_model()))
  session <- sparklyr::spark_session(sc)
  expect_identical(check_sc(session)$kind, "python")

  # A table reaches the workers through a view that is removed afterwards.
  before <- list_views(session)
  table <- dplyr::copy_to(sc, rows, "iris_rows", overwrite = TRUE)
  expect_s3_class(table, "tbl_pyspark")
  from_table <- whole(sc, dplyr::tbl(sc, "iris_rows"))
  expect_equal(
    fit_weights(from_table),
    fit_weights(whole("local", rows)),
    tolerance = 1e-6
  )
  expect_identical(dim(predict(from_table, rows[1:5, ])), c(5L, 4L))

  expect_scored_as_here(sc, session, from_table, table, rows, before)

  # Predictions stay in Spark, with the rows.
  beside <- dplyr::collect(dplyr::arrange(predict(from_table, table), a, b, c, d))
  sorted <- rows[order(rows$a, rows$b, rows$c, rows$d), ]
  expect_equal(
    as.matrix(beside[paste0(".pred_", 0:2)]),
    as.matrix(predict(from_table, sorted)[paste0(".pred_", 0:2)]),
    tolerance = 1e-6
  )

  expect_error(train(sc, table, label = "kind"), class = "tfdist_error_input")
  expect_error(
    barrier_train(sc, dense_model(), table, workers = 3),
    "at most 2 tasks",
    class = "tfdist_error_cluster"
  )

  session$stop()
  expect_snapshot(error = TRUE, check_sc(sc, arg = "sc"))
})
