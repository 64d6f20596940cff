test_that("small and large figures have their digits", {
  figures <- c(0.29124, 2.3141e-5, 12345678.9, 0, NaN)
  expect_identical(show_loss(figures), c("0.2912", "2.314e-05", "1.235e+07", "0.0000", "NaN"))
})

test_that("a fit prints and summarises", {
  expect_snapshot(example_fit())
  expect_snapshot(summary(example_fit()))
})

test_that("a decimal comma of the session changes neither figures nor settings", {
  fit <- example_fit()
  fit$settings$timeout <- 0.5
  fit$workers$rows <- 1234567L
  shown <- utils::capture.output(print(fit))
  withr::local_options(OutDec = ",")
  expect_no_warning(with_comma <- utils::capture.output(print(fit)))
  expect_identical(with_comma, shown)
  expect_identical(describe(2.5), "the number 2.5")
})

test_that("a summary is an object, and names are those that can be used", {
  fit <- example_fit()
  found <- summary(fit)
  expect_s3_class(found, "summary.tfdist_fit")
  expect_identical(found$history$accuracy, c(0.5, 0.875))
  expect_identical(found$workers, fit$workers)
  names <- setdiff(names(fit), "model")
  expect_no_error(lapply(names, function(name) fit[[name]]))
  expect_in(c("model", "history", "workers"), names(fit))
  expect_false(any(c("decoded", "rebuilding", "numbered", "labels") %in% names(fit)))
  expect_length(fit, length(names(fit)))
  expect_identical(fit[[match("epochs", names(fit))]], fit$epochs)
  expect_identical(names(lapply(fit, class)), names)
})

test_that("one row and one step are singular", {
  fit <- example_fit()
  fit$workers$rows <- 1:0
  fit$workers$steps <- c(1L, 1L)
  shown <- utils::capture.output(print(fit))
  expect_match(shown[[1L]], "2 epochs, 1 row,", fixed = TRUE)
  expect_match(shown, "0 to 1 row, 1 step,", fixed = TRUE, all = FALSE)
})

test_that("settings that are not the defaults are shown, and how even the work was", {
  fit <- example_fit()
  fit$settings <- plain_settings(list(
    workers = 2L,
    epochs = 2L,
    batch_size = 16L,
    shuffle = TRUE,
    validation_freq = c(2L, 5L),
    class_weight = c("0" = 1, "1" = 2.5),
    exchange = local_steps(20),
    verbose = 0L,
    recovery = recovery("run-1")
  ))
  fit$workers$rows <- c(50L, 49L)
  expect_snapshot(fit)
  fit$workers <- fit$workers[1, ]
  fit$history <- list()
  fit$seed <- NULL
  fit["seed"] <- list(NULL)
  expect_snapshot(fit)
})

test_that("the size of base64 text is computed in bytes", {
  expect_identical(base64_size("QUJD"), 3L)
  expect_identical(base64_size("QUI="), 2L)
  expect_identical(base64_size("QQ=="), 1L)
})
