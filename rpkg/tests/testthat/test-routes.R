# One small job on every route of R. Each gives the weights of one process.

test_full("local, with a model of this session and with one built by R in the workers", {
  skip_if_no_pybackend()
  expect_scenario(scenario_train("local", model = scenario()$build()))
  expect_scenario(scenario_train("local", model_fn = scenario_model()))
})

test_full("sparklyr: the shared JVM", {
  sc <- file_connection(full_cluster())
  expect_scenario(scenario_train(sc, model = scenario()$build()))
})

test_that("sparklyr: spark_apply() with R in the same application", {
  sc <- file_connection(full_cluster())
  expect_scenario(scenario_train(sc, model_fn = scenario_model()))
})

test_full("sparklyr: rpy2 in the tasks of the same application", {
  sc <- file_connection(full_cluster())
  session <- open_session(check_sc(sc))
  expect_scenario(scenario_train(session, model_fn = scenario_model()))
})
