test_that("counts are whole numbers", {
  expect_identical(check_count(3), 3L)
  expect_null(check_count(NULL, allow_null = TRUE))
  expect_snapshot(error = TRUE, {
    workers <- "two"
    check_count(workers)
    workers <- 0
    check_count(workers)
    workers <- 2.5
    check_count(workers)
    workers <- NA
    check_count(workers)
    workers <- c(1, 2)
    check_count(workers)
    workers <- NULL
    check_count(workers)
    check_count(list(1), allow_null = TRUE, arg = "workers")
    check_count(Inf, arg = "workers")
    check_count(3e9, arg = "workers")
  })
})

test_that("flags, strings, choices and positive numbers say what they expect", {
  expect_snapshot(error = TRUE, {
    check_flag(NA, arg = "shuffle")
    check_flag("yes", arg = "shuffle")
    check_string(1, arg = "label")
    check_string("", allow_null = TRUE, arg = "label")
    check_strings(c("a", NA), arg = "features")
    check_strings(list("a"), arg = "features")
    check_one_of("HDF", c("h5", "keras"), arg = "format")
    check_one_of(7, 0:2, arg = "verbose")
    check_positive(0, arg = "timeout")
    check_positive("5", arg = "timeout")
    check_positive(Inf, arg = "timeout")
    check_positive(-1, finite = FALSE, arg = "bucket_mb")
    check_one_of("zip", c("fp16", "bf16"), allow_null = TRUE, arg = "compression")
  })
  expect_identical(check_positive(Inf, finite = FALSE), Inf)
  expect_null(check_one_of(NULL, "fp16", allow_null = TRUE))
  expect_identical(check_positive(5), 5)
  expect_identical(check_string("a"), "a")
})

test_that("a missing package is named", {
  expect_snapshot(error = TRUE, check_installed("notapackage", "This test"))
})

test_that("input errors have their classes", {
  expect_error(check_count(0), class = "tfdist_error_input")
  expect_error(check_count(0), class = "tfdist_error")
})

test_that("values are described in a few words", {
  expect_identical(describe(NULL), "`NULL`")
  expect_identical(describe("two"), "the string \"two\"")
  expect_identical(describe(strrep("x", 100)), sprintf("the string \"%s...\"", strrep("x", 60)))
  expect_identical(describe(0), "the number 0")
  expect_identical(describe(NaN), "the number NaN")
  expect_identical(describe(NA_character_), "`NA`")
  expect_identical(describe(TRUE), "`TRUE`")
  expect_identical(describe(1:3), "a vector of 3 numbers")
  expect_identical(describe(c("a", "b")), "a vector of 2 strings")
  expect_identical(describe(list(1, 2)), "a list of 2")
  expect_identical(describe(iris), "a data frame of 150 rows")
  expect_identical(describe(matrix(1:6, 2)), "an array, 2 x 3")
  expect_identical(describe(matrix("a")), "an array of type character, 1 x 1")
  expect_identical(describe(mean), "a function")
  expect_identical(describe(Sys.Date()), "an object of class Date")
  expect_identical(describe(quote(a)), "an object of type symbol")
  expect_identical(describe(1i), "a value of type complex")
})

test_that("arguments of keras3's that have another form here say what to pass", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    barrier_train("local", model, x = x, y = y)
    barrier_train("local", model, rows, sample_weight = weights)
    barrier_train("local", model, rows, validation_data = rows, validation_steps = 3)
    barrier_train("local", model, rows, validation_data = rows, validation_batch_size = 64)
    barrier_train("local", model, generator = batches)
    barrier_train("local", model, rows, view_metrics = FALSE)
    barrier_train("local", model, rows, optimizer = "adam")
    barrier_evaluate("local", model, rows, steps = 10)
  })
})

test_that("misspelt arguments, those of option objects, others and values without a name are told", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    barrier_train("local", model, rows, batchsize = 64)
    barrier_train("local", model, rows, validation = rows)
    barrier_train("local", model, rows, loss_over = "global batch")
    barrier_train("local", model, rows, gpus = 1)
    barrier_predict("local", model, x, units = 3)
    barrier_train("local", model, rows, NULL, 10)
    do.call(barrier_train, list("local", epoch = 2))
  })
  takes_dots <- function(...) check_dots_empty(...)
  expect_null(takes_dots())
  # Names of the package's own arguments are arguments of users, too.
  expect_error(takes_dots(frame = 1), "has no argument `frame`", class = "tfdist_error_input")
})

test_that("arguments without a default are asked for by name", {
  fit <- example_fit()
  expect_snapshot(error = TRUE, {
    barrier_train(data = iris)
    barrier_predict("local", fit)
    predict(fit)
    deploy_model(fit)
    to_sql(fit)
    augment_sql()
    read_tfrecords(path = "a")
    write_model(fit)
    generics::augment(fit)
  })
})
