test_that("checkpoints and restarts are checked when they are named", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    recovery(1)
    recovery("run", every = "weekly")
    recovery("run", keep = 0)
    barrier_train("local", function() 1, iris, label = "Species", recovery = 3)
    recovery("run", resume = "yes")
    recovery(resume = TRUE)
    barrier_train("local", function() 1, iris, label = "Species", resume = TRUE)
    barrier_train("local", function() 1, iris, label = "Species", checkpoint = "run")
    barrier_train("local", function() 1, iris, label = "Species", restarts = 1)
  })
  expect_error(recovery("run", every = 0), class = "tfdist_error_input")
})

test_that("checkpoints show what they are, and have Python's defaults", {
  expect_snapshot(recovery("/shared/run", every = "10min"))
  skip_if_no_pybackend()
  expect_same_arguments("recovery", "Recovery")
})

test_full("a training goes on from its checkpoint", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  fit <- train_flowers(iris_arrays(), epochs = 1, recovery = folder)
  more <- train_flowers(iris_arrays(), epochs = 2, recovery = recovery(folder, resume = TRUE))
  expect_identical(more$history$loss[[1L]], fit$history$loss[[1L]])
  kept <- load_checkpoint(folder)
  expect_identical(kept$get_weights(), more$model$get_weights())
})

test_full("elastic training resumes from its checkpoint", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  train <- function(...) {
    settings <- list(workers = elastic(1), seed = 1, verbose = 0, ...)
    do.call(barrier_train, c(list("local", dense_model(), iris_arrays()), settings))
  }
  fit <- train(epochs = 1, recovery = folder)
  more <- train(epochs = 2, recovery = recovery(folder, resume = TRUE))
  expect_identical(more$history$loss[[1L]], fit$history$loss[[1L]])
  expect_identical(more$generations$epoch, c(1L, 2L))
  expect_identical(more$generations$joined, c("", "0"))
})
