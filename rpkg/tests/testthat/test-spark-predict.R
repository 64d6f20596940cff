iris_rows <- function() {
  rows <- iris
  names(rows) <- c("a", "b", "c", "d", "kind")
  rows$id <- seq_len(nrow(rows))
  rows[c("id", "a", "b", "c", "d", "kind")]
}

iris_fit <- function() {
  rows <- iris_rows()
  barrier_train(
    "local",
    dense_model(),
    rows,
    label = "kind",
    features = c("a", "b", "c", "d"),
    workers = 1,
    seed = 1,
    verbose = 0
  )
}

test_that("arguments for Spark tables are rejected elsewhere", {
  rows <- iris_rows()
  expect_error(
    predict(example_fit(), rows, features = "a"),
    "`features` works only with Spark tables",
    class = "tfdist_error_input"
  )
})

# A model with one probability as output.
binary_model <- function() {
  keras <- reticulate::import("keras")
  keras$utils$set_random_seed(7L)
  layers <- list(keras$Input(reticulate::tuple(4L)), keras$layers$Dense(1L, activation = "sigmoid"))
  model <- keras$Sequential(layers)
  model$compile(loss = "binary_crossentropy")
  model
}

test_that("levels are used if the model distinguishes as many classes", {
  skip_if_no_pybackend()
  known <- function(...) model_levels(...)
  model <- binary_model()
  expect_identical(known(model, c("no", "yes")), list("no", "yes"))
  expect_null(known(model, NULL))
  expect_null(known(dense_model(), c("no", "yes")))
  model$compile(loss = "mse")
  expect_null(known(model, c("no", "yes")))
  keras <- reticulate::import("keras")
  model$compile(loss = keras$losses$BinaryCrossentropy(from_logits = TRUE))
  expect_identical(known(model, c("no", "yes")), list("no", "yes"))
})

expect_same_predictions <- function(fit, found) {
  rows <- iris_rows()
  expected <- predict(fit, rows)
  probabilities <- unname(as.matrix(expected[-1]))
  found <- dplyr::arrange(dplyr::collect(found), id)
  expect_identical(names(found)[7:10], c(".pred_class", paste0(".pred_", levels(rows$kind))))
  numbers <- unname(as.matrix(found[paste0(".pred_", levels(rows$kind))]))
  expect_equal(numbers, probabilities, tolerance = 1e-6)
  expect_identical(found$.pred_class, as.character(expected$.pred_class))
  expect_identical(found$kind, as.character(rows$kind))
}

test_that("a sparklyr table keeps its rows and gets predictions", {
  sc <- file_connection("local[2]")
  suppressMessages(fit <- iris_fit())
  table <- sparklyr::sdf_copy_to(sc, iris_rows(), "iris_rows", overwrite = TRUE)

  found <- predict(fit, table)
  expect_s3_class(found, "tbl_spark")
  expect_same_predictions(fit, found)

  expect_same_predictions(fit, predict(fit, table, runtime = "onnx"))

  # dplyr's verbs can be applied to the result.
  expected <- table(as.character(predict(fit, iris_rows())$.pred_class))
  counted <- dplyr::collect(dplyr::count(found, .pred_class))
  expect_equal(sum(counted$n), 150)
  expect_identical(sort(counted$.pred_class), sort(names(expected)))
  few <- dplyr::filter(found, kind == "setosa", .pred_setosa >= 0)
  few <- dplyr::mutate(few, right = .pred_class == kind)
  expect_identical(nrow(dplyr::collect(few)), 50L)

  # A pipeline is a table, too, here with fewer rows.
  piped <- predict(fit, dplyr::filter(table, id <= 10L), type = "class")
  expect_identical(setdiff(colnames(piped), colnames(table)), ".pred_class")
  expect_identical(sparklyr::sdf_nrow(piped), 10)
  raw <- dplyr::collect(predict(fit, dplyr::filter(table, id == 1L), type = "raw"))
  expect_equal(
    unlist(raw$.pred),
    unname(predict(fit, iris_rows()[1, ], type = "raw")[1, ]),
    tolerance = 1e-6
  )

  # Fields of a struct are named as in Spark.
  nested <- dplyr::tbl(sc, dplyr::sql("SELECT id, kind, struct(a, b) AS s, c, d FROM iris_rows"))
  nested <- predict(fit, dplyr::filter(nested, id <= 10L), features = c("s.a", "s.b", "c", "d"))
  expect_identical(colnames(nested)[1:5], c("id", "kind", "s", "c", "d"))
  expect_equal(
    dplyr::pull(dplyr::arrange(nested, id), .pred_setosa),
    predict(fit, iris_rows()[1:10, ])$.pred_setosa,
    tolerance = 1e-6
  )

  holed <- dplyr::mutate(table, b = dplyr::if_else(id == 3L, NA_real_, b))
  holed <- dplyr::collect(dplyr::arrange(predict(fit, dplyr::filter(holed, id < 5L)), id))
  expect_identical(is.na(holed$.pred_class), c(FALSE, FALSE, TRUE, FALSE))
  expect_identical(is.na(holed$.pred_setosa), is.na(holed$.pred_class))

  # Spark computes the same as the formula.
  formula <- kind ~ log(a) + scale(b) + I(c^2) + d
  arguments <- list("local", dense_model(), iris_rows()[-1], formula, workers = 1, verbose = 0)
  computing <- suppressMessages(do.call(barrier_train, arguments))
  scored <- dplyr::collect(dplyr::arrange(augment_sql(table, computing), id))
  expected <- predict(computing, iris_rows())
  expect_equal(scored$.pred_setosa, expected$.pred_setosa, tolerance = 1e-5)
  expect_identical(scored$.pred_class, as.character(expected$.pred_class))

  binary <- fit
  binary$levels <- c("no", "yes")
  binary$decoded <- rlang::env(model = binary_model())
  found <- dplyr::collect(dplyr::arrange(predict(binary, table), id))
  yes <- predict(binary, iris_rows(), type = "raw")[, 1]
  expect_equal(found$.pred_yes, yes, tolerance = 1e-6)
  expect_equal(found$.pred_no, 1 - yes, tolerance = 1e-6)
  expect_identical(found$.pred_class, ifelse(yes > 0.5, "yes", "no"))

  expect_snapshot(error = TRUE, {
    predict(fit, table, type = "classes")
    predict(fit, table, features = "z")
    predict(fit, dplyr::select(table, a, b))
    predict(fit, table, features = c("a", "b"))
    predict(fit, table, batch_size = 0)
    predict(replace(fit, "levels", list(c("it's", "b", "c"))), table)
    predict(replace(fit, "levels", list(c("a", "${env:HOME}", "c"))), table, type = "prob")
  })
})
