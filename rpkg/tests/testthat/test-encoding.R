rows <- data.frame(
  a = c(0.5, 1.5, 2.5),
  colour = factor(c("red", "blue", "red"), levels = c("red", "green", "blue")),
  year = c(2021, 2020, 2021),
  label = c(0L, 1L, 0L)
)

test_that("factors and text are one-hot, or codes on request", {
  found <- check_frame(rows, columns_of(), "data")
  expect_identical(
    found$feature_names,
    c("a", "colour_red", "colour_green", "colour_blue", "year")
  )
  expect_identical(found$x[2, ], c(1.5, 0, 0, 1, 2020))
  expect_identical(found$categories, list(colour = c("red", "green", "blue")))
  expect_identical(found$encode, list(colour = "one_hot"))

  # In Python's order, regardless of the locale.
  text <- transform(rows, colour = c("red", "Blue", "green"))
  expect_identical(
    check_frame(text, columns_of(), "data")$categories$colour,
    c("Blue", "green", "red")
  )

  encode <- c(colour = "integer", year = "one_hot")
  groups <- list(colour = "colour", rest = c("a", "year"))
  found <- check_frame(rows, columns_of(features = groups, encode = encode), "data")
  expect_identical(found$x$colour, matrix(c(0L, 2L, 0L)))
  expect_identical(found$x$rest, cbind(rows$a, c(0, 1, 0), c(1, 0, 1)))
  expect_identical(found$feature_names$rest, c("a", "year_2020", "year_2021"))
})

test_that("later data have the values of the training", {
  columns <- columns_of()
  columns <- narrow_columns(columns, check_frame(rows, columns, "data"))
  later <- check_frame(transform(rows, colour = "blue"), columns, "validation_data")
  expect_identical(later$x[, 2:4], cbind(c(0, 0, 0), 0, 1))
  table <- list(kind = "table")
  expect_snapshot(error = TRUE, {
    check_frame(transform(rows, colour = "pink"), columns, "validation_data")
    check_frame(transform(rows, colour = NA), columns, "validation_data")
    check_frame(transform(rows, a = "b"), columns, "validation_data")
    check_frame(rows, narrow_columns(columns_of(), table), "validation_data")
    check_frame(rows, columns_of(encode = c(a = "one_hot")), "data")
    check_frame(rows, columns_of(features = "a", encode = c(colour = "integer")), "data")
    check_frame(data.frame(id = as.character(1:1001), label = 0), columns_of(), "data")
  })
})

test_that("text that an input takes remains text, if it is the only column there", {
  text <- data.frame(colour = c("red", "blue", "red"), size = c(1, 2, 3), label = 0:2)
  groups <- list(colour = "colour", size = "size")
  columns <- columns_of(features = groups)
  columns$text_inputs <- "colour"
  found <- check_frame(text, columns, "data")
  expect_identical(found$x$colour, matrix(text$colour))
  expect_identical(found$x$size, matrix(text$size))
  expect_identical(found$encode, list(colour = "text"))
  expect_null(found$categories)
  later <- narrow_columns(columns, found)
  expect_identical(check_frame(text[2, ], later, "data")$x$colour, matrix("blue"))
  as_python <- as_python_columns(later, list(kind = "table"), NULL)
  expect_null(as_python$data_options$encode)
  expect_error(
    check_frame(transform(text, colour = NA_character_), later, "data"),
    "missing values"
  )

  columns$features <- list(colour = c("colour", "size"))
  expect_identical(check_frame(text, columns, "data")$encode, list(colour = "one_hot"))
  columns$features <- "colour"
  expect_identical(check_frame(text, columns, "data")$x, matrix(text$colour))
  for (inputs in list(NULL, character(), "size")) {
    columns$features <- groups
    columns["text_inputs"] <- list(inputs)
    expect_identical(check_frame(text, columns, "data")$encode, list(colour = "one_hot"))
  }
})
