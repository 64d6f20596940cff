test_that("a fit prints and summarises", {
  expect_snapshot(example_fit())
  expect_snapshot(summary(example_fit()))
})

test_that("the history is long, training beside validation", {
  history <- as.data.frame(example_fit())
  expect_named(history, c("epoch", "metric", "value", "data"))
  expect_identical(history$epoch, rep(1:2, 4))
  expect_identical(levels(history$metric), c("loss", "accuracy"))
  expect_identical(history$value[history$data == "validation"], c(1.25, 1, 0.625, 0.75))
})

test_that("a fit says who trained from which epoch on", {
  answer <- list(
    workers = list(),
    workers_by_epoch = list(3L, 2L),
    gangs = list(
      list(
        epoch = 1L,
        workers = list(0L, 1L, 2L),
        joined = list(),
        left = rlang::set_names(list())
      ),
      list(epoch = 2L, workers = list(1L, 3L), joined = list(3L), left = list(`0` = "a", `2` = "b"))
    )
  )
  fit <- new_fit(list(to_dict = function() answer))
  expect_identical(fit$workers_by_epoch, c(3L, 2L))
  expect_identical(fit$gangs$workers, c("0, 1, 2", "1, 3"))
  expect_identical(fit$gangs$joined, c("", "3"))
  expect_identical(fit$gangs$left, c("", "0: a, 2: b"))
  expect_identical(nrow(example_fit()$gangs), 0L)
})

test_that("figures keep the numbers of their epochs", {
  answer <- list(
    history = list(loss = c(1.5, 0.75, 0.5, 0.25), val_loss = c(1, 0.5)),
    epochs_of = list(loss = list(3L, 4L, 5L, 6L), val_loss = list(4L, 6L)),
    workers = list()
  )
  fit <- new_fit(list(to_dict = function() answer))
  history <- as.data.frame(fit)
  expect_identical(history$epoch, c(3:6, 4L, 6L))
  expect_identical(wide_history(fit)$epoch, 3:6)
  expect_identical(wide_history(fit)$val_loss, c(NA, 1, NA, 0.5))
})

test_that("a metric of several values has a history for each", {
  several <- list(loss = c(2, 1), f1_score = list(c(0.25, 0.5), c(0.5, 1)), val_mse = list(3, 4))
  expect_identical(
    plain_history(several),
    list(loss = c(2, 1), f1_score_1 = c(0.25, 0.5), f1_score_2 = c(0.5, 1), val_mse = c(3, 4))
  )
  expect_identical(
    plain_history(list(f1_score = list(c(0, 1)))),
    list(f1_score_1 = 0, f1_score_2 = 1)
  )
  expect_identical(plain_history(list()), list())
})

test_that("workers are a data frame", {
  workers <- example_fit()$workers
  expect_identical(workers$rank, 0:1)
  expect_identical(workers$ok, c(TRUE, TRUE))
})

test_that("fields are accessed by name", {
  fit <- example_fit()
  expect_identical(fit[["epochs"]], 2L)
  expect_null(fit$nothing)
})

test_that("prediction checks its rows before Python is used", {
  fit <- example_fit()
  fit$features <- c("a", "b")
  expect_snapshot(error = TRUE, {
    predict(fit, data.frame(a = 1))
    predict(fit, data.frame(a = 1, b = NA_real_))
    predict(fit, data.frame(a = 1, b = "x"))
    predict(fit, "rows")
    predict(fit, matrix(1:4, 2), batch_size = 0)
    predict(fit, matrix(1:4, 2), batchsize = 4)
  })
})

test_that("the size of base64 text is computed in bytes", {
  expect_identical(base64_size("QUJD"), 3L)
  expect_identical(base64_size("QUI="), 2L)
  expect_identical(base64_size("QQ=="), 1L)
})

test_that("score columns are named by the levels if their number fits", {
  scores <- matrix(1:6, 2)
  expect_identical(colnames(name_columns(scores, c("a", "b", "c"))), c("a", "b", "c"))
  expect_null(colnames(name_columns(scores, c("a", "b"))))
  expect_null(colnames(name_columns(scores, NULL)))
})
