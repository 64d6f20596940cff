test_that("values come back unchanged", {
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
    "a \"quoted\"\nline",
    as.POSIXlt("2026-01-01", tz = "UTC"),
    # bit64 stores whole numbers as the bits of a double, which as.double() would convert.
    structure(c(2.5e-323, 5.4e-312), class = "integer64"),
    structure(list(1, 2, 3), class = "tfdist_short")
  )
  # Methods of a class must not change what is sent.
  local_mocked_s3_method("length", "tfdist_short", function(x) 1L)
  local_mocked_s3_method("as.double", "integer64", function(x, ...) 42)
  for (value in values) {
    expect_identical(unpack_value(pack_value(value)), value)
  }
})

test_that("what cannot be sent back is named, with its position", {
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

test_that("what would lose its meaning is rejected", {
  setClass("TfdistPoint", representation("numeric"), where = environment())
  expect_error(pack_value(new("TfdistPoint", 1)), "is an S4 object", fixed = TRUE)
  expect_error(pack_value("\xe4"), "is text that is not valid UTF-8", fixed = TRUE)
})

test_that("Python objects do not travel", {
  skip_if_no_pybackend()
  expect_error(pack_value(reticulate::import("sys")), "is a Python object", fixed = TRUE)
})
