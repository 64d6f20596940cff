test_full("a cluster of two executors trains as this machine does", {
  sc <- file_connection("local-cluster[2,1,1024]")
  # The network of train_mnist().
  spark <- seed_fit(sc)
  expect_equal(fit_weights(spark), fit_weights(seed_fit("local")), tolerance = 1e-6)
  expect_identical(spark$workers$rank, 0:1)

  # More workers than slots of the cluster.
  expect_error(
    barrier_train(sc, dense_model(), iris_arrays(), workers = 5, verbose = 0),
    class = "tfdist_error_cluster"
  )
})

test_full("a pipeline is fitted and predicts on executors", {
  sc <- file_connection("local-cluster[2,1,1024]")
  rows <- stats::setNames(iris, c("a", "b", "c", "d", "kind"))
  table <- sparklyr::sdf_copy_to(sc, rows, "flowers_on_executors", overwrite = TRUE)
  fitted <- sparklyr::ml_pipeline(sc) |>
    sparklyr::ft_string_indexer("kind", "label") |>
    sparklyr::ft_vector_assembler(c("a", "b", "c", "d"), "features") |>
    ml_keras(dense_model(), workers = 2, epochs = 2, seed = 1) |>
    sparklyr::ml_fit(table)
  found <- dplyr::collect(dplyr::arrange(sparklyr::ml_predict(fitted, table), a, b, c, d))
  sorted <- as.matrix(dplyr::arrange(rows, a, b, c, d)[1:4])
  scores <- fitted$keras$model$predict(sorted, verbose = 0L)
  expect_equal(found$prediction, max.col(scores) - 1)
})

test_full("trials run at once on executors, with rows of a Spark table", {
  sc <- file_connection("local-cluster[2,1,1024]")
  rows <- stats::setNames(iris, c("a", "b", "c", "d", "kind"))
  table <- sparklyr::sdf_copy_to(sc, rows, "rows_of_trials", overwrite = TRUE)
  build <- function(units) dense_model(units = as.integer(units))
  train <- function(call, model, ...) {
    suppressMessages(call(sc, model, table, kind ~ ., ..., epochs = 2, seed = 3, verbose = 0))
  }
  trials <- train(train_many, build, grid = list(units = c(3, 1, 4)))
  # The label has three classes.
  expect_identical(trials$status, c("completed", "failed", "completed"))
  expect_identical(attr(trials, "search")$parallelism, 2L)
  alone <- train(barrier_train, function() build(3), workers = 1)
  first <- best(trials, 1)
  expect_identical(first$history, alone$history)
  expect_identical(fit_weights(first), fit_weights(alone))
})
