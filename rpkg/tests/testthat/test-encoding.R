rows <- data.frame(
  a = c(0.5, 1.5, 2.5),
  colour = factor(c("red", "blue", "red"), levels = c("red", "green", "blue")),
  year = c(2021, 2020, 2021),
  label = c(0L, 1L, 0L)
)

test_that("factors and text are one-hot, or codes on request", {
  found <- check_frame(rows, columns_of(), "data", NULL)
  expect_identical(
    found$feature_names,
    c("a", "colour_red", "colour_green", "colour_blue", "year")
  )
  expect_identical(found$x[2, ], c(1.5, 0, 0, 1, 2020))
  expect_identical(found$categories, list(colour = c("red", "green", "blue")))
  expect_identical(found$encode, list(colour = "one_hot"))

  # As Python sorts, whatever the locale.
  text <- transform(rows, colour = c("red", "Blue", "green"))
  expect_identical(
    check_frame(text, columns_of(), "data", NULL)$categories$colour,
    c("Blue", "green", "red")
  )

  encode <- c(colour = "integer", year = "one_hot")
  groups <- list(colour = "colour", rest = c("a", "year"))
  found <- check_frame(rows, columns_of(features = groups, encode = encode), "data", NULL)
  expect_identical(found$x$colour, matrix(c(0L, 2L, 0L)))
  expect_identical(found$x$rest, cbind(rows$a, c(0, 1, 0), c(1, 0, 1)))
  expect_identical(found$feature_names$rest, c("a", "year_2020", "year_2021"))
})

test_that("later data have the values of the training", {
  columns <- columns_of()
  columns <- narrow_columns(columns, check_frame(rows, columns, "data", NULL))
  later <- check_frame(transform(rows, colour = "blue"), columns, "validation_data", NULL)
  expect_identical(later$x[, 2:4], cbind(c(0, 0, 0), 0, 1))
  table <- list(kind = "table")
  expect_snapshot(error = TRUE, {
    check_frame(transform(rows, colour = "pink"), columns, "validation_data", NULL)
    check_frame(transform(rows, colour = NA), columns, "validation_data", NULL)
    check_frame(rows, narrow_columns(columns_of(), table), "validation_data", NULL)
    check_frame(rows, columns_of(encode = c(a = "one_hot")), "data", NULL)
    check_frame(rows, columns_of(features = "a", encode = c(colour = "integer")), "data", NULL)
    check_frame(data.frame(id = as.character(1:1001), label = 0), columns_of(), "data", NULL)
  })
})
