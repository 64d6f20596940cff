codes <- function(weights, y = 0:2, ...) {
  class_weight_codes(weights, list(y = y, ...))
}

test_that("classes become codes", {
  expect_null(codes(NULL))
  expect_identical(codes(c("0" = 1, "10" = 5L)), list("0" = 1, "10" = 5))
  expect_identical(codes(list("2" = 1L)), list("2" = 1))
  expect_identical(codes(table(c(0, 0, 1))), list("0" = 2, "1" = 1))
})

test_that("the classes of a factor are its levels, or else their codes", {
  flowers <- factor(c("setosa", "virginica"))
  expect_identical(codes(c(virginica = 3), flowers), list("1" = 3))
  expect_identical(codes(c("1" = 3), flowers), list("1" = 3))
  expect_identical(codes(c("2" = 3), factor(c("1", "2"))), list("1" = 3))
})

test_that("the values in `categories` are the classes of a table", {
  expect_identical(codes(c(b = 2), NULL, levels = c("a", "b")), list("1" = 2))
})

test_that("the classes of text that Python reads stay as they are", {
  data <- list(kind = "table", levels = c("b", "a"))
  expect_identical(class_weight_codes(c(a = 2, b = 1), data), list(a = 2, b = 1))
})

test_that("weights that cannot be used are rejected by name", {
  flowers <- factor(c("setosa", "virginica"))
  expect_snapshot(error = TRUE, {
    codes(c(setosa = 1))
    codes(c("-1" = 1))
    codes(c(rose = 1), flowers)
    codes(c("2" = 1), flowers)
    codes(c("1" = 1, "01" = 1))
    codes(c("0" = 1), sample_weight = 1)
    class_weight_codes(c("0" = 1), list(kind = "table", weight = "w"))
    codes(c("0" = 1), kind = "function")
  })
})
