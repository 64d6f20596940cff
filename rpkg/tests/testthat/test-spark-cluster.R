test_that("a cluster of two executors trains as this machine does", {
  sc <- file_connection("local-cluster[2,1,1024]")
  train <- function(sc) {
    barrier_train(
      sc,
      dense_model(),
      iris_arrays(),
      workers = 2,
      epochs = 2,
      seed = 1,
      verbose = 0
    )
  }
  spark <- train(sc)
  expect_equal(fit_weights(spark), fit_weights(train("local")), tolerance = 1e-6)
  expect_identical(spark$workers$rank, 0:1)
  expect_identical(nrow(spark$workers), 2L)

  expect_equal(fit_weights(seed_fit(sc)), fit_weights(seed_fit("local")), tolerance = 1e-6)

  # More workers than the cluster has slots.
  expect_error(
    barrier_train(sc, dense_model(), iris_arrays(), workers = 5, verbose = 0),
    class = "tfdist_error_cluster"
  )
})
