dtype <- function(array) as.character(array$dtype$name)
at <- function(array, ...) {
  reticulate::py_to_r(array$item(reticulate::tuple(...)))
}

test_that("element [i + 1, j + 1, k + 1] in R is [i, j, k] in numpy, row by row", {
  skip_if_no_pybackend()
  x <- array(as.double(1:24), c(2, 3, 4))
  array <- as_feature_array(x)
  expect_identical(dtype(array), "float32")
  expect_true(reticulate::py_to_r(array$flags$c_contiguous))
  expect_identical(reticulate::py_to_r(array$shape), list(2L, 3L, 4L))
  for (i in 0:1) {
    for (j in 0:2) {
      for (k in 0:3) {
        expect_equal(at(array, i, j, k), x[i + 1, j + 1, k + 1])
      }
    }
  }
})

test_that("types: doubles float32, integers int32, raw uint8, logical 0 and 1", {
  skip_if_no_pybackend()
  expect_identical(dtype(as_feature_array(matrix(1:4, 2))), "int32")
  expect_identical(dtype(as_feature_array(matrix(as.raw(1:4), 2))), "uint8")
  expect_identical(dtype(as_feature_array(matrix(c(TRUE, FALSE), 2))), "float32")
  expect_identical(dtype(as_label_array(c(TRUE, FALSE))), "int32")
  expect_identical(dtype(as_label_array(c(0.5, 1))), "float32")
})

test_that("a vector becomes an array, even if it has one element", {
  skip_if_no_pybackend()
  expect_identical(reticulate::py_to_r(as_feature_array(0.5)$shape), list(1L))
  expect_identical(reticulate::py_to_r(as_label_array(1:3)$shape), list(3L))
})

test_that("a factor becomes codes from 0", {
  skip_if_no_pybackend()
  codes <- as_label_array(factor(c("b", "a", "c"), levels = c("a", "b", "c")))
  expect_identical(reticulate::py_to_r(codes$tolist()), c(1L, 0L, 2L))
})

test_that("several inputs become a list, or a dict by name", {
  skip_if_no_pybackend()
  x <- matrix(1:4, 2)
  expect_s3_class(as_input(list(x, x), as_feature_array), "python.builtin.list")
  # A variable with the name of an input is not used.
  left <- "variable"
  named <- as_input(list(left = x, right = x), as_feature_array)
  expect_s3_class(named, "python.builtin.dict")
  expect_named(reticulate::py_to_r(named), c("left", "right"))
})

test_that("Python arrays are passed unchanged", {
  skip_if_no_pybackend()
  numpy <- reticulate::import("numpy", convert = FALSE)
  array <- numpy$zeros(reticulate::tuple(5L, 2L))
  expect_identical(as_feature_array(array), array)
  expect_identical(count_rows(array), 5L)
})

test_that("text that is not valid in its encoding names its column and row", {
  latin <- c("a", "caf\xe9", "b")
  bytes <- latin
  Encoding(bytes) <- "bytes"
  known <- latin
  Encoding(known) <- "latin1"
  skip_if_not(l10n_info()$`UTF-8`, "a locale in which Latin-1 is not valid")
  frame <- function(text) data.frame(text = text, x = 1:3, label = 0:2)
  check <- function(data, label = "label") {
    check_frame(data, column_spec(label, NULL, NULL, NULL), "data")
  }
  expect_snapshot(error = TRUE, {
    check(frame(latin))
    check(frame(factor(latin)))
    check(frame(bytes))
    check(frame(latin), "text")
    check_array(latin, "x", text = TRUE)
  })
  expect_identical(check(frame(known))$categories$text, c("a", "b", "caf\u00e9"))
})
