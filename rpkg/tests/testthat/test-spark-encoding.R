# One step with all rows, so that their order does not matter.
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

test_full("data frames, Spark tables and arrays encoded by hand give the same model", {
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

  # Each fit predicts for the other's rows, and is evaluated on them.
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
  strict <- predict(of_frame, pink, on_missing = "error")
  expect_error(dplyr::collect(strict), "'colour' contains 'pink'")
  expect_true(all(is.na(dplyr::collect(predict(of_frame, pink))$.pred_class)))
  computed <- of_frame
  computed$preparation <- choose_columns(list(), kind ~ log(size), NULL, flowers)$preparation
  expect_snapshot(error = TRUE, {
    train_once("local", flowers, kind ~ . - id, inputs = 4L)
    train_once(sc, table, kind ~ . - id, inputs = 4L)
    predict(of_frame, transform(flowers, place = "c"), on_missing = "error")
    train_once(sc, table, kind ~ log(size))
    predict(computed, table)
  })
})
