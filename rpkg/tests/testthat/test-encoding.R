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

# One step on all rows: their order does not matter.
train_once <- function(sc, data, ..., inputs = 6L) {
  keras <- reticulate::import("keras")
  keras$utils$set_random_seed(7L)
  layers <- list(keras$Input(reticulate::tuple(inputs)), keras$layers$Dense(3L))
  model <- keras$Sequential(layers)
  loss <- keras$losses$SparseCategoricalCrossentropy(from_logits = TRUE)
  model$compile(optimizer = "sgd", loss = loss)
  suppressMessages(
    barrier_train(sc, model, data, ..., workers = 1, batch_size = 150, seed = 1, verbose = 0)
  )
}

flowers <- data.frame(
  id = 1:150,
  size = iris$Sepal.Length,
  colour = rep(c("red", "blue", "green"), each = 50),
  place = rep(c("b", "a"), 75),
  kind = as.character(iris$Species)
)

test_that("data frames, Spark tables and arrays encoded by hand give the same model", {
  sc <- file_connection("local[2]")
  of_frame <- train_once("local", flowers, kind ~ . - id)
  names <- c("size", "colour_blue", "colour_green", "colour_red", "place_a", "place_b")
  expect_identical(of_frame$feature_names, names)

  one_hot <- function(column, values) 1 * outer(column, values, `==`)
  x <- cbind(
    flowers$size,
    one_hot(flowers$colour, c("blue", "green", "red")),
    one_hot(flowers$place, c("a", "b"))
  )
  by_hand <- train_once("local", list(x, factor(flowers$kind)))
  expect_identical(fit_weights(of_frame), fit_weights(by_hand))
  scores <- predict(by_hand, x)
  expect_equal(predict(of_frame, flowers[-1], type = "raw"), scores, ignore_attr = TRUE)

  table <- sparklyr::sdf_copy_to(sc, flowers, "flowers", overwrite = TRUE)
  of_table <- train_once(sc, table, kind ~ . - id)
  expect_equal(fit_weights(of_table), fit_weights(by_hand), tolerance = 1e-6)
  shared <- c("features", "feature_names", "categories", "encode", "levels", "label")
  expect_equal(unclass(of_table)[shared], unclass(of_frame)[shared])
  selected <- train_once(sc, table, label = kind, features = c(size, colour, place))
  expect_equal(fit_weights(selected), fit_weights(by_hand), tolerance = 1e-6)

  # Each predicts for the other's rows, and is evaluated on them.
  found <- dplyr::collect(predict(of_frame, table, type = "prob"))
  found <- as.matrix(found[order(found$id), paste0(".pred_", of_frame$levels)])
  expect_equal(found, softmax(scores), tolerance = 1e-6, ignore_attr = TRUE)
  expect_equal(
    predict(of_table, flowers, type = "raw"),
    scores,
    tolerance = 1e-6,
    ignore_attr = TRUE
  )
  figures <- barrier_evaluate("local", by_hand, list(x, factor(flowers$kind)), workers = 1)
  expect_equal(barrier_evaluate("local", of_table, flowers, workers = 1), figures, tolerance = 1e-5)
  expect_equal(barrier_evaluate(sc, of_frame, table, workers = 1), figures, tolerance = 1e-5)

  pink <- dplyr::mutate(table, colour = "pink")
  expect_error(dplyr::collect(predict(of_frame, pink)), "'colour' holds 'pink'")
  computed <- of_frame
  computed$preparation <- choose_columns(list(), kind ~ log(size), NULL, flowers)$preparation
  expect_snapshot(error = TRUE, {
    train_once("local", flowers, kind ~ . - id, inputs = 4L)
    train_once(sc, table, kind ~ . - id, inputs = 4L)
    predict(of_frame, transform(flowers, place = "c"))
    train_once(sc, table, kind ~ log(size))
    predict(computed, table)
  })
})
