test_that("a plan starts nothing and shows what a training would start", {
  skip_if_no_pybackend()
  planned <- plan("local", dense_model(), iris, Species ~ ., workers = 2, seed = 3, epochs = 4)
  expect_s3_class(planned, "tfdist_plan")
  expect_identical(planned$rows, 150L)
  expect_identical(planned$workers$rank, 0:1)
  expect_identical(planned$workers$rows, c(75L, 75L))
  expect_identical(planned$steps_per_epoch, 3L)
  expect_identical(planned$settings$epochs, 4L)
  expect_output(
    print(planned),
    "nothing was started: a training run with 2 processes.*arrays of 150 rows.*worker 1: this"
  )
  held_out <- plan("local", dense_model(), iris, label = Species, validation_data = iris[1:9, ])
  expect_match(held_out$validation_data, "9 rows")
})

test_that("a strategy of futures is for the plan() of that package", {
  multisession <- structure(function() NULL, class = c("multisession", "future", "function"))
  expect_snapshot(error = TRUE, {
    plan(multisession)
    plan(multisession, workers = 2, gc = TRUE)
    plan("multisession")
    plan(list(multisession, multisession))
  })
})

test_that("a plan makes the checks of a training", {
  skip_if_no_pybackend()
  own <- names(formals(plan)) != "submit"
  expect_identical(as.list(formals(plan)[own]), as.list(formals(barrier_train)))
  expect_snapshot(error = TRUE, {
    plan("local", function() NULL, iris, Species ~ ., wokers = 3)
    plan("local", function() NULL, iris, label = Sepcies)
    plan("local", function() NULL, iris, Species ~ ., epochs = 0)
    plan(NULL)
  })
})
