test_that("an observer is checked when it is made", {
  expect_snapshot(error = TRUE, {
    observer()
    observer(on_epoch_end = "stop")
    observer(on_epoch_end = function(epoch) TRUE)
    observer(on_step_end = sum)
  })
  expect_s3_class(observer(on_step_end = function(...) NULL), "tfdist_observer")
})

test_full("an observer stops the training after an epoch, with the history of so many", {
  skip_if_no_pybackend()
  seen <- list()
  watch <- observer(
    on_epoch_end = function(epoch, logs) {
      seen[[epoch]] <<- logs
      epoch == 2
    },
    on_step_end = function(step, logs) data.frame(step = step)
  )
  keras <- reticulate::import("keras")
  train <- function(...) {
    barrier_train(
      "local",
      dense_model,
      iris_arrays(),
      ...,
      workers = 2,
      batch_size = 16,
      seed = 1,
      verbose = 0
    )
  }
  fit <- train(epochs = 5, callbacks = list(keras$callbacks$TerminateOnNaN(), watch))
  expect_identical(fit$history, train(epochs = 2)$history)
  losses <- vapply(seen, function(logs) logs$loss, 0)
  expect_identical(losses, as.numeric(fit$history$loss))
})

test_that("a comparison with a figure that logs have not is said once", {
  observing <- as_python_observing(function(epoch, logs) logs$error < 1, "on_epoch_end")
  expect_false(observing(1L, list(loss = 0.5, val_loss = 0.6)))
  expect_false(observing(2L, list(loss = 0.4, val_loss = 0.5)))
  expect_snapshot(invisible(signal_kept_warnings()))
})

test_full("an error in an observer is the error of the training", {
  skip_if_no_pybackend()
  watch <- observer(on_epoch_end = function(epoch, logs) {
    rlang::abort("no such plot", class = "plot_error", epoch = epoch)
  })
  error <- expect_error(
    barrier_train("local", dense_model, iris_arrays(), epochs = 2, callbacks = watch, verbose = 0),
    "no such plot",
    class = "plot_error"
  )
  expect_identical(error$epoch, 1L)
  # The function is called by the name of its argument, which base R's errors show.
  observing <- as_python_observing(function(step, logs) stop("no such plot"), "on_step_end")
  call <- tryCatch(observing(1L, list()), error = conditionCall)
  expect_identical(call, quote(on_step_end(step, logs)))
})
