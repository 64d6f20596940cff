test_that("a cluster of two executors trains as this machine does", {
  sc <- file_connection("local-cluster[2,1,1024]")
  # The network of train_mnist().
  spark <- seed_fit(sc)
  expect_equal(fit_weights(spark), fit_weights(seed_fit("local")), tolerance = 1e-6)
  expect_identical(spark$workers$rank, 0:1)

  # More workers than the cluster has slots.
  expect_error(
    barrier_train(sc, dense_model(), iris_arrays(), workers = 5, verbose = 0),
    class = "tfdist_error_cluster"
  )
})
