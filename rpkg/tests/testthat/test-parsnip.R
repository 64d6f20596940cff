skip_if_no_parsnip <- function() {
  if (!requireNamespace("parsnip", quietly = TRUE)) {
    skip_or_fail("the R package parsnip is missing")
  }
}

test_that("tfdist is an engine of parsnip's mlp()", {
  skip_if_no_parsnip()
  skip_if_no_pybackend()
  rows <- transform(iris, place = factor(rep(c("b", "a"), 75)))
  spec <- parsnip::mlp("classification", hidden_units = 4, epochs = 2, penalty = 0.01)
  spec <- parsnip::set_engine(spec, "tfdist", workers = 1, seed = 1)
  fit <- parsnip::fit(spec, Species ~ ., rows)
  expect_s3_class(fit$fit, "tfdist_fit")
  expect_identical(tail(fit$fit$feature_names, 2), c("place_a", "place_b"))

  probabilities <- predict(fit, rows[1:5, -5], type = "prob")
  expect_s3_class(probabilities, "tbl_df")
  expect_named(probabilities, paste0(".pred_", levels(iris$Species)))
  expect_equal(rowSums(probabilities), rep(1, 5), tolerance = 1e-6)
  classes <- predict(fit, rows[1:5, -5])$.pred_class
  expect_identical(as.character(classes), levels(iris$Species)[max.col(probabilities)])

  withr::local_options(tfdist.workers = 1)
  spec <- parsnip::set_engine(parsnip::set_mode(spec, "regression"), "tfdist", seed = 1)
  numbers <- parsnip::fit(spec, Sepal.Length ~ Sepal.Width + place, rows)
  expect_identical(nrow(numbers$fit$workers), 1L)
  found <- predict(numbers, rows[1:5, ])
  gap <- transform(rows[1:5, ], Sepal.Width = c(3, NA, 3, 3, 3))
  expect_identical(is.na(predict(numbers, gap)$.pred), 1:5 == 2L)
  expect_true(is.na(predict(fit, transform(rows[1, ], Petal.Width = NA_real_))$.pred_class))
  expect_error(
    parsnip::fit(parsnip::set_args(spec, activation = "foo"), Sepal.Length ~ Sepal.Width, rows),
    "Keras has no activation \"foo\""
  )
  expect_equal(
    found$.pred,
    predict(numbers$fit, rows[1:5, c("Sepal.Width", "place")], type = "raw")[, 1]
  )
})

test_that("an argument that the engine does not have is named as the engine's", {
  expect_snapshot(error = TRUE, {
    train_mlp(iris[1:4], iris$Species, wrkers = 2)
    train_mlp(iris[1:4], iris$Species, label = "Species")
  })
})
