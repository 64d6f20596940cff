test_that("history and figures are tibbles", {
  fit <- example_fit()
  history <- generics::tidy(fit)
  expect_s3_class(history, "tbl_df")
  expect_identical(as.list(history), as.list(as.data.frame(fit)))
  row <- generics::glance(fit)
  expect_identical(dim(row), c(1L, 9L))
  expect_identical(row$rows, 100L)
  expect_identical(row$val_loss, 1)
})

test_that("predictions stand beside the rows", {
  skip_if_no_pybackend()
  fit <- example_fit(levels = levels(iris$Species))
  fit$features <- names(iris)[1:4]
  fit$decoded <- rlang::env(model = dense_model())
  rows <- iris[c(1, 51), ]
  beside <- generics::augment(fit, rows)
  expect_identical(as.list(beside[1:5]), as.list(rows))
  expect_identical(as.list(beside[6:9]), as.list(predict(fit, rows)))
  expect_named(generics::augment(fit, rows, type = "class"), c(names(iris), ".pred_class"))
  expect_snapshot(error = TRUE, {
    generics::augment(fit, as.matrix(iris[1:4]))
    generics::augment(fit, rows, type = "raw")
    generics::augment(fit, beside)
  })
})
