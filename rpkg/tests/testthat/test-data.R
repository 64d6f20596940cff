here <- list(kind = "local")
check <- function(data, label = "label", features = NULL, ...) {
  check_data(data, columns_of(label, features), here, ..., arg = "data")
}

test_that("pairs of arrays are accepted with and without names", {
  x <- matrix(1:6, 3)
  plain <- check(list(x, 1:3))
  expect_identical(plain$kind, "arrays")
  expect_identical(check(list(y = 1:3, x = x)), plain)
  weighted <- check(list(x, 1:3, c(1, 2, 1)))
  expect_identical(weighted$sample_weight, c(1, 2, 1))
  expect_identical(check(list(iris[1:4], iris$Species))$features, names(iris)[1:4])
  chosen <- check(list(iris[1:4], iris$Species), features = names(iris)[4:3])
  expect_identical(chosen$features, names(iris)[4:3])
  expect_equal(chosen$x[, 1], iris[[4]])
  expect_null(check(NULL, allow_null = TRUE))
  as_columns <- check(list(iris[1:4], iris["Species"], iris["Sepal.Width"]))
  expect_identical(as_columns$y, iris$Species)
  expect_identical(as_columns$sample_weight, iris$Sepal.Width)
})

test_that("inputs may come without labels", {
  x <- matrix(1:6, 3)
  alone <- check(x)
  expect_identical(alone[c("kind", "x", "y")], list(kind = "arrays", x = x, y = NULL))
  expect_identical(check(list(x)), alone)
  expect_identical(check(list(x = x)), alone)
  inputs <- list(left = x, right = x)
  expect_identical(check(inputs)$x, inputs)
  expect_identical(check(list(inputs))$x, inputs)
  frame <- check(iris[1:4], label = NULL)
  expect_identical(frame$features, names(iris)[1:4])
  expect_null(frame$y)
  expect_equal(frame$x[, 4], iris[[4]])
})

test_that("data of other kinds are rejected", {
  expect_snapshot(error = TRUE, {
    check(1:10)
    check(NULL)
    check("digits", allow_null = TRUE)
    check(list())
    check(list(x = 1, b = 2))
    check(list(x = 1, sample_weight = 2))
    check(list(left = matrix(1:6, 3), right = 1:2))
    check(matrix(c(1, NA), 1))
    check(list(1, 2, 3, 4))
  })
})

test_that("a path becomes absolute, a function must take the worker's context", {
  folder <- withr::local_tempdir()
  file <- file.path(folder, "rows.parquet")
  writeLines("x", file)
  withr::local_dir(folder)
  expect_identical(check("rows.parquet")$value, file.path(getwd(), "rows.parquet"))
  expect_identical(check(file)$kind, "path")
  expect_identical(check(paste0("file://", file))$value, paste0("file://", file))
  expect_identical(check("s3://bucket/rows")$value, "s3://bucket/rows")
  several <- check(c("rows.parquet", "r*.parquet"))$value
  expect_identical(several, as.list(file.path(getwd(), c("rows.parquet", "r*.parquet"))))
  expect_identical(absolute_path("~/rows"), path.expand("~/rows"))
  expect_identical(check(function(ctx) NULL)$kind, "function")
  expect_snapshot(error = TRUE, {
    check("absent/rows.parquet")
    check("file:///absent/rows.parquet")
    check(function() NULL)
    check(sum)
  })
})

test_that("arrays that cannot be used are rejected by name", {
  x <- matrix(as.double(1:6), 3)
  with_na <- x
  with_na[2, 1] <- NA
  expect_snapshot(error = TRUE, {
    check(list(x, 1:4))
    check(list(x, as.list(1:7)))
    check(list(x = list(left = x, right = x[-1, ]), y = 1:3))
    check(list(with_na, 1:3))
    check(list(x, c(1, NA, 3)))
    check(list(x, c("a", "b", "c")))
    check(list(matrix("a", 3, 2), 1:3))
    check(list(factor(c("a", "b", "c")), 1:3))
    check(list(list(), 1:3))
    check(list(x[0, ], integer()))
    check(list(x, structure(c(1, 2, 3), class = "integer64")))
  })
})

test_that("a Spark table needs Spark", {
  table <- structure(list(), class = c("tbl_spark", "tbl_sql", "tbl_lazy", "tbl"))
  expect_snapshot(error = TRUE, check(table))
})

test_that("labels get the codes of the training's levels, whatever their order", {
  training <- factor(c("a", "b"))
  expect_null(match_levels(NULL, levels(training)))
  expect_identical(match_levels(list(y = 1:2), NULL)$y, 1:2)
  other <- factor(c("b", "a", "b"), levels = c("b", "unused", "a"))
  expect_identical(
    match_levels(list(y = other), levels(training))$y,
    factor(c("b", "a", "b"), levels = c("a", "b"))
  )
  expect_snapshot(error = TRUE, {
    match_levels(list(y = factor("c")), c("a", "b"), "validation_data")
    match_levels(list(y = factor("a")), NULL)
  })
})

test_that("TRUE and FALSE are classes", {
  logical <- c(TRUE, FALSE, TRUE)
  classes <- factor(logical, c(FALSE, TRUE))
  expect_identical(check(list(matrix(1:3), logical))$y, classes)
  rows <- data.frame(a = 1:3, label = logical)
  expect_identical(check_frame(rows, columns_of("label"), "data")$y, classes)
  weights <- class_weight_codes(c("TRUE" = 3, "FALSE" = 1), list(y = classes))
  expect_identical(weights, list("1" = 3, "0" = 1))
})

test_that("the codes of the levels are reported", {
  expect_snapshot(inform_levels(levels(iris$Species)))
  expect_snapshot(inform_levels(letters))
  expect_no_message(inform_levels(NULL))
})

test_that("tables of a database are fetched, or predicted there", {
  table <- structure(list(), class = c("tbl_SQLiteConnection", "tbl_sql", "tbl_lazy", "tbl"))
  connection <- structure(list(), class = c("SQLiteConnection", "DBIConnection"))
  fit <- example_fit()
  expect_snapshot(error = TRUE, {
    barrier_train("local", fit, table)
    barrier_train("local", fit, mtcars, label = "mpg", validation_data = table)
    predict(fit, table)
    predict(fit, connection)
    generics::augment(fit, table)
    barrier_predict("local", fit, table)
  })
})
