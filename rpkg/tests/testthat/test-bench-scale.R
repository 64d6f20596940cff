test_that("wrong arguments are refused by name", {
  train <- function(workers, batch_size) stop("never called")
  expect_error(bench_scale(5), "`train` must be a function", class = "tfdist_error_input")
  expect_error(bench_scale(function() 1), "must take `workers` and `batch_size`")
  expect_error(bench_scale(train, project = 1), "`project` must be a whole number of at least 2")
  expect_error(
    bench_scale(train, 2, project = 9),
    "`project` needs at least two values in `workers`"
  )
  skip_if_no_pybackend()
  expect_error(bench_scale(train, workers = "1,2"), "`workers` must be")
  expect_error(bench_scale(train, mode = "linear"), "`mode` must be")
  expect_error(bench_scale("missing.R"), "missing.R cannot be read", class = "tfdist_error_input")
  expect_error(bench_scale(train, workers = c(1, 3)), "shared equally by 3 workers")
  expect_error(
    bench_scale(function(workers, batch_size) 3, 1),
    "must return the result of barrier_train"
  )
})

test_full("a training is measured with several numbers of workers, and projected", {
  skip_if_no_pybackend()
  train <- function(workers, batch_size) {
    suppressMessages(barrier_train(
      "local",
      dense_model(),
      iris_arrays(),
      workers = workers,
      batch_size = batch_size,
      epochs = 3,
      verbose = 0
    ))
  }
  found <- bench_scale(train, c(1, 2), mode = "weak", batch_size = 15, project = 8, verbose = 0)
  expect_identical(found$workers, c(1L, 2L, 4L, 8L))
  expect_identical(found$is_projected, c(FALSE, FALSE, TRUE, TRUE))
  measured <- found[!found$is_projected, ]
  expect_equal(measured$batch_size, c(15, 15))
  parts <- measured[c("data", "compute", "communication", "waiting")]
  expect_equal(measured$seconds, unname(rowSums(parts)))
  expect_equal(measured$speedup, measured$workers * measured$efficiency)
  expect_true(all(found$efficiency[3:4] > 0))
  # Slow steps have long numbers, and a table that is too wide for the console has more lines.
  withr::local_options(width = 200)
  shown <- capture.output(print(found))
  expect_length(shown, 6)
  expect_match(shown[[2]], "weak +1 +15 .* 1.00 +1.00 +[0-9]+/[0-9]+/0/0$")
  expect_match(shown[[5]], "weak +8 +15 .* \\(projected\\)$")
  expect_s3_class(as.data.frame(found), "data.frame", exact = TRUE)
})
