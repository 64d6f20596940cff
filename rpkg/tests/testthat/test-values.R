test_that("values come back exactly as they were", {
  values <- list(
    NULL,
    1:3,
    c(a = 1 / 3, b = NA, c = NaN, d = Inf, e = -0),
    iris[c(1, 51, 101), ],
    factor(c("x", NA, "y")),
    list(a = 1, b = list("\u00e4", NA_character_, character()), NULL),
    as.raw(0:255),
    matrix(1:4, 2, dimnames = list(NULL, c("p", "q"))),
    as.POSIXct("2026-01-01", tz = "UTC"),
    c(TRUE, NA),
    1 + 2i,
    list(),
    integer(),
    "a \"quoted\"\nline"
  )
  for (value in values) {
    expect_identical(unpack_value(pack_value(value)), value)
  }
})

test_that("what does not travel is named with its place", {
  expect_error(
    pack_value(list(1, list(mean))),
    "the result[[2]][[1]] is of type closure",
    fixed = TRUE
  )
  expect_error(pack_value(globalenv()), "the result is of type environment", fixed = TRUE)
  expect_error(
    pack_value(structure(1, f = quote(a))),
    "attribute \"f\" of the result is of type symbol",
    fixed = TRUE
  )
})

test_that("Python objects do not travel", {
  skip_if_no_pybackend()
  expect_error(pack_value(reticulate::import("sys")), "is a Python object", fixed = TRUE)
})
