test_that("prediction checks its rows before Python is used", {
  fit <- example_fit()
  fit$features <- c("a", "b")
  expect_snapshot(error = TRUE, {
    predict(fit, data.frame(a = 1))
    predict(fit, data.frame(a = 1, b = NA_real_), on_missing = "error")
    predict(fit, data.frame(a = 1, a = 2, b = 3, check.names = FALSE))
    predict(fit, data.frame(a = 1, b = 2), on_missing = "drop")
    predict(fit, data.frame(a = 1, b = "x"))
    predict(fit, factor("rows"))
    predict(fit, NULL)
    predict(fit, matrix(1:4, 2), batch_size = 0)
    predict(fit, matrix(1:4, 2), batchsize = 4)
  })
})

test_that("score columns are named by the levels if their number fits", {
  scores <- matrix(1:6, 2)
  expect_identical(colnames(name_columns(scores, c("a", "b", "c"))), c("a", "b", "c"))
  expect_null(colnames(name_columns(scores, c("a", "b"))))
  expect_null(colnames(name_columns(scores, NULL)))
})

test_that("types are checked before Python is used", {
  expect_snapshot(error = TRUE, {
    predict(example_fit(), matrix(1:4, 2), type = "numeric")
    predict(example_fit(), data.frame(a = 1), features = "a")
    predict(example_fit(), data.frame(a = 1), runtime = "onnx")
    predict(example_fit(), data.frame(a = 1), runtime = "tf")
  })
})

test_that("a matrix whose columns have names is read by them", {
  x <- matrix(as.double(1:6), 2, dimnames = list(NULL, c("a", "b", "c")))
  expect_identical(matrix_columns(x), c("a", "b", "c"))
  expect_null(matrix_columns(unname(x)))
  expect_null(matrix_columns(cbind(x, a = 1)))
  expect_identical(matrix_columns(list(l = x, r = x))$r, c("a", "b", "c"))
  expect_null(matrix_columns(list(l = x, r = unname(x))))
  expect_identical(order_columns(x[, 3:1], c("a", "b", "c"), "x"), x)
  expect_identical(order_columns(unname(x), c("c", "b", "a"), "x"), unname(x))
  known <- list(l = c("a", "c"), r = "b")
  found <- order_columns(list(l = x, r = x), known, "x")
  expect_identical(found, list(l = x[, c("a", "c")], r = x[, "b", drop = FALSE]))
  expect_snapshot(error = TRUE, order_columns(x, c("a", "d"), "x"))
})

test_that("rows are taken of arrays of any shape, and missing values found in them", {
  cube <- array(as.double(1:12), c(2, 3, 2))
  expect_identical(take_rows(cube, 2L), cube[2, , , drop = FALSE])
  expect_identical(take_rows(list(cube, 1:2), 2L), list(cube[2, , , drop = FALSE], 2L))
  cube[1, 2, 2] <- NA
  expect_identical(complete_rows(cube), c(FALSE, TRUE))
  expect_identical(complete_rows(list(1:2, c(1, NA))), c(TRUE, FALSE))
  cube[2, 3, 1] <- -Inf
  expect_identical(complete_rows(cube), c(FALSE, FALSE))
  expect_identical(spread_rows(matrix(1:2, 1), c(FALSE, TRUE)), rbind(c(NA, NA), 1:2))
  expect_identical(spread_rows(factor("b"), c(TRUE, FALSE)), factor(c("b", NA)))
})

# A fit with this model.
fit_of <- function(model, levels = NULL) {
  fit <- example_fit(levels = levels)
  fit$decoded <- rlang::env(model = model)
  fit
}

test_that("data frames get classes and probabilities, arrays the model's numbers", {
  skip_if_no_pybackend()
  levels <- levels(iris$Species)
  fit <- fit_of(dense_model(), levels)
  rows <- iris[c(1, 51, 101, 102), 1:4]
  raw <- predict(fit, as.matrix(rows))
  expect_identical(dimnames(raw), list(NULL, levels))
  expect_identical(predict(fit, rows, type = "raw"), raw)

  found <- predict(fit, rows)
  expect_s3_class(found, "tbl_df")
  expect_named(found, c(".pred_class", paste0(".pred_", levels)))
  # The loss is `from_logits`.
  expect_equal(unname(as.matrix(found[-1])), unname(softmax(raw)), tolerance = 1e-6)
  expect_identical(found$.pred_class, factor(levels[max.col(raw)], levels))
  expect_identical(predict(fit, as.matrix(rows), type = "class"), found[1])
  expect_identical(predict(fit, as.matrix(rows), type = "prob"), found[-1])
  plain <- predict(fit_of(fit$model), rows[1, ])
  expect_named(plain, c(".pred_class", ".pred_0", ".pred_1", ".pred_2"))
  expect_identical(levels(plain$.pred_class), c("0", "1", "2"))

  without_tibble <- as_rows(as.list(found), has_tibble = FALSE)
  expect_identical(class(without_tibble), "data.frame")
  expect_identical(as.list(without_tibble), as.list(found))
  expect_identical(dim(without_tibble), c(4L, 4L))
})

test_that("a row without a value has no prediction, and no rows have none", {
  skip_if_no_pybackend()
  levels <- levels(iris$Species)
  fit <- fit_of(dense_model(), levels)
  rows <- iris[c(1, 51, 101), 1:4]
  whole <- predict(fit, rows)
  raw <- predict(fit, rows, type = "raw")
  rows[2, 3] <- NA
  found <- predict(fit, rows)
  expect_identical(found[c(1, 3), ], whole[c(1, 3), ])
  expect_true(all(is.na(found[2, ])))
  expect_identical(levels(found$.pred_class), levels)
  raw[2, ] <- NA
  expect_equal(predict(fit, rows, type = "raw"), raw)
  expect_equal(predict(fit, as.matrix(rows)), raw, ignore_attr = TRUE)
  expect_equal(
    suppressMessages(barrier_predict("local", fit, rows, workers = 1)),
    found,
    tolerance = 1e-6
  )
  for (few in list(rows[0, ], rows[2, ])) {
    expect_identical(dim(predict(fit, few)), c(nrow(few), 4L))
    expect_identical(dim(predict(fit, few, type = "raw")), c(nrow(few), 3L))
  }
  expect_identical(dim(predict(fit, matrix(0, 0, 4))), c(0L, 3L))
  expect_error(predict(fit, rows, on_missing = "error"), "missing values, first in row 2")
  rows[2, 3] <- Inf
  expect_identical(predict(fit, rows), found)
  expect_equal(predict(fit, as.matrix(rows)), raw, ignore_attr = TRUE)
  expect_error(predict(fit, rows, on_missing = "error"), "infinite in row 2")
})

test_that("arrays that do not fit the model are named as such", {
  skip_if_no_pybackend()
  fit <- fit_of(dense_model())
  expect_snapshot(error = TRUE, {
    predict(fit, matrix(1, 2, 5))
    predict(fit, c(1, 2, 3, 4))
    predict(fit, matrix(1, 2, 5), type = "class")
    generics::evaluate(fit, matrix(1, 2, 5), c(0, 1))
  })
  expect_error(
    predict(fit, list(a = matrix(1, 2, 4))),
    "has one input, .* but x has arrays named a"
  )
})

test_that("a model that was trained on a named matrix reads others by name", {
  skip_if_no_pybackend()
  x <- as.matrix(iris[1:4])
  train <- function(x, ...) {
    suppressMessages(barrier_train(
      "local",
      dense_model(),
      list(x, iris$Species),
      ...,
      workers = 1,
      seed = 1,
      verbose = 0
    ))
  }
  fit <- train(x, validation_data = list(x[, 4:1], iris$Species))
  expect_identical(fit$features, colnames(x))
  scores <- predict(fit, x)
  expect_identical(predict(fit, x[, 4:1]), scores)
  expect_identical(predict(fit, unname(x)), scores)
  expect_identical(predict(fit, rev(iris), type = "raw"), scores)
  expect_equal(
    generics::evaluate(fit, x[, 4:1], iris$Species)[["loss"]],
    fit$history$val_loss,
    tolerance = 1e-5
  )
  expect_error(predict(fit, x[, -1]), "has no column \"Sepal.Length\", a feature of the training")
})

test_that("one probability or one logit tells two classes", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  model <- keras$Sequential(list(keras$Input(reticulate::tuple(4L)), keras$layers$Dense(1L)))
  model$compile(loss = keras$losses$BinaryCrossentropy(from_logits = TRUE))
  rows <- iris[c(1, 51, 101), 1:4]
  fit <- fit_of(model, c("no", "yes"))
  yes <- stats::plogis(predict(fit, rows, type = "raw")[, 1])
  found <- predict(fit, rows)
  expect_equal(found$.pred_yes, yes, tolerance = 1e-6)
  expect_equal(found$.pred_no, 1 - yes, tolerance = 1e-6)
  expect_identical(as.character(found$.pred_class), ifelse(yes > 0.5, "yes", "no"))

  # The same layer with a loss that expects probabilities, which its numbers are not.
  model$compile(loss = "binary_crossentropy")
  expect_named(predict(fit, rows), ".pred_class")
  expect_snapshot(error = TRUE, predict(fit, rows, type = "prob"))
  model$add(keras$layers$Activation("sigmoid"))
  model$compile(loss = "binary_crossentropy")
  expect_equal(predict(fit, rows, type = "prob")$.pred_yes, yes, tolerance = 1e-6)
})

test_that("regression gives a column for each output", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  input <- keras$Input(reticulate::tuple(4L))
  one <- keras$layers$Dense(1L, name = "one")(input)
  two <- keras$layers$Dense(2L, name = "two")(input)
  rows <- iris[1:3, 1:4]
  model <- keras$Model(input, one)
  model$compile(loss = "mse")
  found <- predict(fit_of(model), rows)
  expect_named(found, ".pred")
  expect_equal(found$.pred, predict(fit_of(model), as.matrix(rows))[, 1])
  several <- fit_of(keras$Model(input, list(one, two)))
  found <- predict(several, rows)
  expect_named(found, c(".pred_one", ".pred_two"))
  expect_equal(found$.pred_two, predict(several, rows, type = "raw")[[2]])
  expect_error(predict(several, rows, type = "class"), class = "tfdist_error_input")
})

test_that("columns have the names of the labels, and a factor's output its classes", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  train <- function(model, loss, ...) {
    model$compile("sgd", loss)
    suppressMessages(barrier_train("local", model, ..., workers = 1, seed = 1, verbose = 0))
  }
  input <- keras$Input(reticulate::tuple(1L), name = "wt")
  pair <- keras$layers$Dense(2L)(input)
  fit <- train(keras$Model(input, pair), "mse", mtcars, cbind(mpg, hp) ~ wt)
  raw <- predict(fit, mtcars, type = "raw")
  expect_identical(colnames(raw), c("mpg", "hp"))
  expect_identical(as.list(predict(fit, mtcars)), list(.pred_mpg = raw[, 1], .pred_hp = raw[, 2]))

  classes <- keras$layers$Dense(3L)(input)
  losses <- list(
    pair = "mse",
    cyl = keras$losses$SparseCategoricalCrossentropy(from_logits = TRUE)
  )
  labels <- list(pair = cbind(mpg = mtcars$mpg, hp = mtcars$hp), cyl = ordered(mtcars$cyl))
  model <- keras$Model(input, list(pair = pair, cyl = classes))
  fit <- train(model, losses, list(as.matrix(mtcars["wt"]), labels))
  found <- predict(fit, mtcars)
  raw <- predict(fit, mtcars, type = "raw")
  expect_identical(colnames(raw$cyl), c("4", "6", "8"))
  expect_identical(found$.pred_pair_hp, unname(raw$pair[, "hp"]))
  expect_identical(found$.pred_cyl_class, ordered(max.col(raw$cyl), 1:3, colnames(raw$cyl)))
  expect_equal(found$.pred_cyl_8, softmax(raw$cyl)[, 3], tolerance = 1e-6)
})

test_that("the class of an ordered label is ordered", {
  skip_if_no_pybackend()
  rows <- transform(iris, Species = ordered(Species))
  fit <- train_flowers(rows, epochs = 1)
  expect_identical(predict(fit, rows)$.pred_class[0], rows$Species[0])
  expect_false(is.ordered(predict(update(fit, data = iris, epochs = 1), rows)$.pred_class))
})

test_that("several labels for a model of one output are refused", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  model <- keras$Sequential(list(keras$Input(reticulate::tuple(1L)), keras$layers$Dense(1L)))
  model$compile("sgd", "mse")
  expect_snapshot(error = TRUE, barrier_train("local", model, mtcars, cbind(mpg, hp) ~ wt))
})
