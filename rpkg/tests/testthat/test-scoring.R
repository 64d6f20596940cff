test_that("bad arguments are errors before anything is started", {
  skip_if_no_pybackend()
  fit <- example_fit(levels = levels(iris$Species))
  x <- as.matrix(iris[1:4])
  table <- structure(list(), class = c("tbl_spark", "tbl_sql", "tbl_lazy", "tbl"))
  expect_snapshot(error = TRUE, {
    barrier_evaluate("yarn", fit, iris, label = "Species")
    barrier_evaluate("local", "model", iris, label = "Species")
    barrier_evaluate("local", function(units) units, iris, label = "Species")
    barrier_evaluate("local", fit, iris)
    barrier_evaluate("local", fit, 1:4)
    barrier_evaluate("local", fit, list(x, iris$Species[1:9]))
    barrier_evaluate("local", fit, list(x, factor(iris$Species == "setosa")))
    barrier_evaluate("local", fit, iris, label = "Species", workers = 0)
    barrier_evaluate("local", fit, iris, label = "Species", batch_size = 0)
    barrier_evaluate("local", fit, iris, label = "Species", model_options = "mine")
    barrier_evaluate("local", fit, iris, label = "Species", safe_mode = FALSE)
    barrier_evaluate("local", fit, iris, label = "Species", verbose = 3)
    barrier_evaluate("local", fit, iris, label = "Species", timeout = -1)
    barrier_evaluate("local", fit, iris, label = "Species", epochs = 2)
    barrier_predict(5, fit, x)
    barrier_predict("local", NULL, x)
    barrier_predict("local", fit, factor("rows"))
    barrier_predict("local", fit, iris)
    barrier_predict("local", fit, table)
    barrier_predict("local", fit, x, workers = "two")
    barrier_predict("local", fit, x, batch_size = 1.5)
    barrier_predict("local", fit, x, label = "Species")
  })
})

test_that("codes of text are those of a training, not of the rows", {
  build <- function() NULL
  rows <- data.frame(a = c("b", "c"), label = 0:1)
  expect_snapshot(error = TRUE, {
    barrier_evaluate("local", build, rows)
    barrier_evaluate("local", build, transform(rows, a = 1:2, label = a))
    barrier_evaluate("local", build, list(rows["a"], 0:1))
  })
  # Also if the training defined them.
  fit <- example_fit()
  fit$features <- "a"
  expect_snapshot(error = TRUE, barrier_evaluate("local", fit, rows))
})

test_that("what is given completes, column by column, what the fit knows", {
  fit <- example_fit()
  fit$features <- c("a", "b")
  fit$categories <- list(a = c("x", "y"), b = c("x", "z"), kind = c("no", "yes"))
  fit$encode <- list(a = "one_hot", b = "one_hot")
  fit$label <- "kind"
  complete <- function(...) complete_columns(columns_of(...), fit)
  of_a <- complete("type", features = "a")
  expect_identical(of_a$categories, list(a = c("x", "y"), type = c("no", "yes")))
  expect_identical(of_a$encode, list(a = "one_hot"))
  encode <- complete("kind", encode = c(a = "integer"))$encode
  expect_identical(encode, list(a = "integer", b = "one_hot"))
  expect_identical(complete("kind", encode = "integer")$encode, "integer")
})

test_that("a fit provides what its model needs", {
  settings <- function(
    model,
    workers = 2,
    batch_size = 32,
    resources = NULL,
    model_options = NULL,
    verbose = TRUE,
    timeout = 60
  ) {
    scoring_settings(model)
  }
  fit <- example_fit()
  fit$custom_objects <- list(mine = mean)
  fit$safe_mode <- FALSE
  expect_identical(settings(fit)$model_options$custom_objects, list(mine = mean))
  expect_false(settings(fit)$model_options$safe_mode)
  others <- model_options(custom_objects = list(other = mean))
  expect_named(settings(fit, model_options = others)$model_options$custom_objects, "other")
  expect_null(settings(mean)$model_options)
})

test_that("a label that is left out is that of the training, if the data have it", {
  fit <- example_fit()
  expect_identical(scored_label(fit, iris), "label")
  fit$label <- "Species"
  expect_identical(scored_label(fit, iris), "Species")
  expect_identical(scored_label(fit, "rows.parquet"), "Species")
  expect_identical(scored_label(fit, data.frame(size = 1, label = 2)), "label")
  expect_identical(scored_label(mean, iris), "label")
  # A formula fixes the label, also in fits that continue the training.
  fit$formula <- Species ~ .
  expect_identical(scored_label(fit, data.frame(size = 1, label = 2)), "Species")
  expect_identical(complete_columns(columns_of("Species"), fit)$formula, fit$formula)
})

test_full("several workers compute what one process computes", {
  skip_if_no_pybackend()
  fit <- train_flowers(iris)
  alone <- evaluate_here(fit$model, iris_arrays())
  expect_named(alone, c("accuracy", "loss"))

  # Columns are matched by name, and the label is coded by the levels of the training.
  expect_no_message(
    figures <- barrier_evaluate("local", fit, rev(iris), label = "Species", workers = 3)
  )
  expect_type(figures, "double")
  expect_equal(figures[names(alone)], alone, tolerance = 1e-5)

  options <- list("local", fit, rev(iris), workers = 3, batch_size = 16)
  expect_equal(do.call(barrier_predict, options), predict(fit, iris), tolerance = 1e-5)
  scores <- do.call(barrier_predict, c(options, type = "raw"))
  expect_identical(colnames(scores), levels(iris$Species))
  expect_equal(scores, predict(fit, iris, type = "raw"), tolerance = 1e-5)
})

test_full("models and functions are scored as fits are", {
  skip_if_no_pybackend()
  model <- dense_model()
  data <- list(as.matrix(iris[1:4]), iris$Species)
  alone <- evaluate_here(model, data)
  expect_message(figures <- barrier_evaluate(NULL, model, data), "setosa = 0")
  expect_equal(figures[names(alone)], alone, tolerance = 1e-5)
  scores <- barrier_predict(NULL, dense_model, data[[1]][1:7, ])
  expect_equal(scores, model$predict(data[[1]][1:7, ], verbose = 0L), tolerance = 1e-5)
  classes <- barrier_predict(NULL, dense_model, iris[1:7, 1:4], type = "class")
  expect_named(classes, ".pred_class")
  expect_identical(nrow(classes), 7L)
})

test_that("a model of several inputs and outputs returns a list", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  left <- keras$Input(reticulate::tuple(2L), name = "left")
  right <- keras$Input(reticulate::tuple(2L), name = "right")
  model <- keras$Model(
    list(left, right),
    list(keras$layers$Dense(3L)(left), keras$layers$Dense(1L)(right))
  )
  x <- list(as.matrix(iris[1:2]), as.matrix(iris[3:4]))
  # The model is not compiled: only an evaluation needs that.
  scores <- barrier_predict("local", model, x, workers = 2)
  alone <- model$predict(lapply(x, as_feature_array), verbose = 0L)
  expect_type(scores, "list")
  expect_identical(lapply(scores, dim), list(c(150L, 3L), c(150L, 1L)))
  expect_equal(scores, alone, tolerance = 1e-5)
  expect_error(
    barrier_evaluate("local", model, list(x, x)),
    class = "tfdist_error_input"
  )
})

test_full("a metric of several values keeps them", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  model <- dense_model()
  model$compile(loss = "categorical_crossentropy", metrics = list(keras$metrics$F1Score()))
  x <- as.matrix(iris[1:4])
  y <- diag(3)[as.integer(iris$Species), ]
  figures <- barrier_evaluate("local", model, list(x, y))
  alone <- model$evaluate(x, y, verbose = 0L, return_dict = TRUE)
  expect_length(figures$f1_score, 3L)
  expect_equal(figures$f1_score, as.double(alone$f1_score), tolerance = 1e-5)
})
