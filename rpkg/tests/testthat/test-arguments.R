test_that("the arguments of a call are checked by their names", {
  call <- function(workers = 2, seed = NULL, verbose = TRUE) {
    check_arguments(c("workers", "seed", "verbose"))
  }
  expect_identical(call(), list(workers = 2L, seed = NULL, verbose = 1L))
  expect_snapshot(error = TRUE, {
    call(workers = "two")
    call(seed = -1)
  })
})

test_that("shuffling, verbosity and validation epochs say what they expect", {
  expect_snapshot(error = TRUE, {
    check_shuffle(NA, arg = "shuffle")
    check_shuffle("rows", arg = "shuffle")
    check_verbose("loud", arg = "verbose")
    check_validation_freq(0, arg = "validation_freq")
    check_validation_freq("all", arg = "validation_freq")
  })
  expect_identical(check_shuffle("global"), "global")
  expect_identical(check_verbose(TRUE), 1L)
  expect_identical(check_validation_freq(2), 2L)
  expect_identical(check_validation_freq(c(1, 5)), list(1L, 5L))
  expect_identical(check_validation_freq(list(1L, 5L)), list(1L, 5L))
})

test_that("callbacks and custom objects must come from Python", {
  expect_null(check_callbacks(NULL))
  expect_null(check_callbacks(list()))
  expect_snapshot(error = TRUE, {
    check_callbacks(list(mean), arg = "callbacks")
    check_callbacks("early", arg = "callbacks")
    check_custom_objects(list(1), arg = "custom_objects")
  })
})
