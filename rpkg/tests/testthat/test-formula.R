of <- function(formula, data = iris, ..., options = NULL) {
  choose_columns(rlang::quos(...), formula, options, data)
}

rows <- data.frame(
  y = c(1, 2, 4, 8, 16, 32),
  size = c(0.5, 1.5, 2.5, 3.5, 4.5, 5.5),
  colour = rep(c("red", "blue", "green"), 2),
  flag = c(TRUE, FALSE),
  w = 1:6
)

test_that("a formula of names selects columns", {
  expect_identical(of(Species ~ Petal.Width + Sepal.Width)$features, names(iris)[c(4, 2)])
  all_but <- of(Species ~ . - Sepal.Width, weight = Petal.Width)
  expect_identical(all_but$label, "Species")
  expect_identical(all_but$features, c("Sepal.Length", "Petal.Length"))
  expect_identical(all_but$weight, "Petal.Width")
  expect_identical(all_but$encode, "one_hot")
  expect_null(all_but$preparation)
  odd <- data.frame(`my y` = 1, `a b` = 2, check.names = FALSE)
  expect_identical(of(`my y` ~ ., odd)$features, "a b")
})

test_that("what a formula computes is that of base R, with a column for each level", {
  columns <- of(log(y) ~ poly(size, 2) + colour * flag - 1, rows, weight = w)
  found <- check_frame(rows, columns, "data")
  expect_identical(columns$label, "log(y)")
  expect_equal(unname(found$y), log(rows$y))
  expect_identical(found$sample_weight, as.double(rows$w))
  expect_identical(
    found$feature_names,
    c(
      c("poly(size, 2)1", "poly(size, 2)2", "colour_blue", "colour_green", "colour_red", "flag"),
      c("colour_blue:flag", "colour_green:flag", "colour_red:flag")
    )
  )
  expect_equal(found$x[, 1:2], unclass(poly(rows$size, 2))[, 1:2], ignore_attr = TRUE)
  expect_equal(found$x[, 3], as.double(rows$colour == "blue"))
  expect_equal(found$x[, 9], as.double(rows$colour == "red" & rows$flag))

  # Later rows are computed with the levels and the mean of the training, not with their own.
  fit <- structure(
    c(list(preparation = columns$preparation), found[c("features", "categories", "encode")]),
    class = "tfdist_fit"
  )
  expect_equal(check_newdata(rows[2:3, -1], fit)$rows, found$x[2:3, ], ignore_attr = TRUE)
  odd <- transform(rows[1:4, ], colour = c("pink", NA, "red", "red"), size = c(1, 2, NA, 4))
  checked <- check_newdata(odd, fit, "null")
  expect_identical(checked$complete, c(FALSE, FALSE, FALSE, TRUE))
  expect_equal(
    checked$rows,
    check_newdata(odd[4, ], fit)$rows,
    ignore_attr = TRUE
  )
  expect_snapshot(error = TRUE, {
    check_newdata(transform(rows, colour = "pink"), fit, "error", "newdata")
    check_newdata(transform(rows, colour = NA), fit, "error", "newdata")
    check_newdata(transform(rows, size = NA_real_), fit, "error", "newdata")
    check_newdata(rows["size"], fit, "error", "newdata")
  })
})

test_that("in an interaction FALSE has a column where model.matrix() has one", {
  numbers <- function(formula) check_frame(rows, of(formula, rows), "data")$x
  names <- function(formula) check_frame(rows, of(formula, rows), "data")$feature_names
  expect_identical(names(y ~ flag:size), c("flag_FALSE:size", "flag_TRUE:size"))
  expect_equal(numbers(y ~ flag:size), model.matrix(~ flag:size - 1, rows), ignore_attr = TRUE)
  expect_identical(names(y ~ flag * size), c("flag", "size", "flag:size"))
  expect_identical(names(y ~ size + flag:size), c("size", "size:flag"))
})

test_that("later rows need the columns of a computed label, whatever this session has", {
  y <- 1:6
  columns <- narrow_columns(of(log(y) ~ sqrt(size), rows), list())
  expect_snapshot(error = TRUE, check_frame(rows[c("size", "w")], columns, "data"))
})

test_that("a fit computes of later rows what the training has computed", {
  skip_if_no_pybackend()
  train <- function(...) {
    suppressMessages(barrier_train("local", dense_model(), ..., workers = 1, seed = 1, verbose = 0))
  }
  fit <- train(iris, Species ~ log(Sepal.Length) + poly(Petal.Length, 2) + Petal.Width)
  x <- cbind(log(iris$Sepal.Length), poly(iris$Petal.Length, 2), iris$Petal.Width)
  by_hand <- train(list(x, iris$Species))
  expect_identical(fit_weights(fit), fit_weights(by_hand))
  expect_equal(
    predict(fit, iris[3:4, ], type = "raw"),
    predict(by_hand, x[3:4, ]),
    tolerance = 1e-6
  )
  expect_equal(
    barrier_evaluate("local", fit, iris[1:60, ], workers = 1),
    barrier_evaluate("local", by_hand, list(x[1:60, ], iris$Species[1:60]), workers = 1),
    tolerance = 1e-5
  )
  expect_equal(
    generics::evaluate(fit, iris, weight = Sepal.Width),
    generics::evaluate(by_hand, list(x, iris$Species, iris$Sepal.Width)),
    tolerance = 1e-5
  )
})

test_that("formulas that cannot be applied are errors", {
  table <- structure(list(), class = c("tbl_spark", "tbl_sql", "tbl_lazy", "tbl"))
  expect_snapshot(error = TRUE, {
    of("y")
    of(~size, rows)
    of(y ~ 1, rows)
    of(y ~ offset(size) + flag, rows)
    of(y ~ C(flag, contr.sum) + size, rows)
    of(y ~ log(size) + y, rows)
    of(y ~ size + (1 | flag), rows)
    of(y ~ size | flag, rows)
    of(Survived ~ Class, Titanic)
    of(y ~ size, list(1, 2))
    of(y ~ size, matrix(1, 2, 2, dimnames = list(NULL, c("y", "size"))))
    of(y ~ size, rows, label = y)
    of(y ~ zz + log(size), rows)
    of(y ~ log(size), rows, options = data_options(encode = "integer"))
    check_can_prepare(of(y ~ log(size), rows)$preparation, table, "data")
    check_can_prepare(of(y ~ log(size), rows)$preparation, "rows.parquet", "data")
  })
  for (formula in list(
    y ~ y,
    y ~ size + y,
    y ~ size:y,
    y ~ I(y^2),
    log(y) ~ size + y,
    log(y) ~ sqrt(y)
  )) {
    expect_error(of(formula, rows), "`y` on both sides", fixed = TRUE, info = format(formula))
  }
  expect_no_error(of(log(y) ~ ., rows))
  expect_error(
    of(y ~ log(size) + n, cbind(rows, n = 1), weight = n),
    "the weight `n` among the features"
  )
  expect_no_error(of(y ~ I(flag | size > 1), rows))
  days <- data.frame(y = 1:2, day = as.Date(c("2026-11-01", "2026-11-02")))
  expect_error(of(log(y) ~ day, days), "`day` of `formula` is of class Date", fixed = TRUE)
  expect_error(of(y ~ log(size), "rows.parquet"), "computes `log(size)` with R", fixed = TRUE)
})

test_that("a term that depends on all rows is named", {
  prepare <- function(formula) formula_columns(formula, mtcars, NULL, NULL)$preparation
  expect_snapshot(error = TRUE, {
    prepare(mpg ~ rank(hp) + wt)
    prepare(mpg ~ I(hp - mean(hp)))
    prepare(mpg ~ cut(hp, 3))
  })
  for (formula in c(mpg ~ scale(hp), mpg ~ poly(hp, 2) + wt, mpg ~ cut(hp, c(0, 100, 400)))) {
    expect_s3_class(prepare(formula), "tfdist_formula")
  }
})

test_that("a term that depends on all rows is named whatever their order", {
  prepare <- function(formula) formula_columns(formula, sorted, NULL, NULL)$preparation
  sorted <- data.frame(y = 1:40, day = 1:40, kind = rep(c("x", "b", "a", "c"), 10))
  for (formula in list(
    y ~ I(day - min(day)),
    y ~ I(day / max(day)),
    y ~ as.integer(factor(kind)),
    y ~ I(day > quantile(day, 0.01))
  )) {
    expect_error(prepare(formula), "depends on all rows", info = format(formula))
  }
  expect_no_error(prepare(y ~ poly(day, 2) + factor(kind) + log(day)))
})

test_that("a variable of the session is said not to be kept", {
  threshold <- 3
  rows <- data.frame(y = 1:4, a = 1:4)
  prepare <- function(formula) formula_columns(formula, rows, NULL, NULL)$preparation
  expect_message(prepare(y ~ I(a > threshold)), "`formula` uses `threshold` of this session")
  expect_no_message(prepare(y ~ I(a > pi)))
})
