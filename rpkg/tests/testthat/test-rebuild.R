# Models with layers, losses and metrics that are R functions or classes.

# Defined in the workspace, as users do, and removed at the end.
in_workspace <- function(code, frame = parent.frame()) {
  before <- ls(globalenv())
  eval(code, globalenv())
  names <- setdiff(ls(globalenv()), before)
  withr::defer(rm(list = intersect(names, ls(globalenv())), envir = globalenv()), frame)
  mget(names, globalenv())
}

# Define, until the test ends, a function that builds a model with a layer, a loss and a metric of
# R, and a function that it calls, both in the workspace.
define_model <- function(frame = parent.frame()) {
  in_workspace(
    frame = frame,
    quote({
      tfdist_test_double <- function(x) 2 * x
      tfdist_test_model <- function() {
        layer_scaled <- keras3::new_layer_class(
          "Scaled",
          build = function(input_shape) {
            self$scale <- self$add_weight(shape = list(4L), name = "scale")
          },
          call = function(inputs) tfdist_test_double(inputs) * self$scale
        )
        share_of_hits <- function(y_true, y_pred) {
          keras3::metric_sparse_categorical_accuracy(y_true, y_pred)
        }
        model <- keras3::keras_model_sequential(input_shape = 4L) |>
          layer_scaled(name = "scaled") |>
          keras3::layer_dense(3, activation = "softmax")
        keras3::compile(
          model,
          keras3::optimizer_adam(0.05),
          function(y_true, y_pred) keras3::loss_sparse_categorical_crossentropy(y_true, y_pred),
          keras3::custom_metric("hits", share_of_hits)
        )
      }
    })
  )
}

train_defined <- function(made, epochs) {
  build <- made$tfdist_test_model
  rows <- iris_arrays()
  barrier_train("local", NULL, rows, model_fn = build, epochs = epochs, seed = 1, verbose = 0)
}

test_that("what is written in R comes back whole, also in another session", {
  skip_if_no_pybackend()
  skip_if_not_installed("keras3")
  made <- define_model()
  rows <- iris_arrays()
  fit <- train_defined(made, 1)
  expect_identical(fit$model_format, "weights.h5")
  compare <- reticulate::import("pybackend.core.model.compare")
  expect_identical(compare$hash_weights(fit$model), fit$rebuilding$digest)

  path <- withr::local_tempfile(fileext = ".rds")
  saveRDS(fit, path)
  rm(list = names(made), envir = globalenv())
  saved <- readRDS(path)
  expect_identical(predict(saved, rows[[1]]), predict(fit, rows[[1]]))
  figures <- evaluate.tfdist_fit(saved, rows[[1]], rows[[2]])
  expect_named(figures, c("loss", "hits"))
  hits <- max.col(predict(saved, rows[[1]])) == rows[[2]] + 1L
  expect_equal(figures[["hits"]], mean(hits), tolerance = 1e-6)

  list2env(made, globalenv())
  # Keras's own file of the model is for sessions that have the layer.
  file <- withr::local_tempfile(fileext = ".keras")
  write_model(saved, file)
  expect_error(reticulate::import("keras")$saving$load_model(file), "Scaled")
  expect_snapshot(error = TRUE, {
    barrier_train("local", made$tfdist_test_model, rows)
    predict(saved, structure(list(), class = "tbl_spark"))
    ml_keras(structure(list(), class = "tfdist_ml_pipeline"), saved)
  })
})

test_full("a model of R's functions is trained on as if its training had not been interrupted", {
  skip_if_no_pybackend()
  skip_if_not_installed("keras3")
  made <- define_model()
  rows <- iris_arrays()
  saved <- train_defined(made, 1)
  rm(list = names(made), envir = globalenv())
  rest <- update(saved, sc = "local", data = rows, epochs = 1, verbose = 0)
  list2env(made, globalenv())
  expect_equal(fit_weights(rest), fit_weights(train_defined(made, 2)), tolerance = 1e-6)
  expect_equal(
    barrier_evaluate("local", rest, rows, workers = 1, verbose = 0),
    evaluate.tfdist_fit(rest, rows[[1]], rows[[2]]),
    tolerance = 1e-6
  )
})

test_full("a train step written in R trains as Keras's own does", {
  skip_if_no_pybackend()
  skip_if_not_installed("keras3")
  build <- function() {
    train_step <- function(data) {
      tensorflow <- reticulate::import("tensorflow")
      tape <- tensorflow$GradientTape()
      with(tape, {
        guess <- self(data[[1]], training = TRUE)
        loss <- self$compute_loss(x = data[[1]], y = data[[2]], y_pred = guess)
      })
      self$optimizer$apply(tape$gradient(loss, self$trainable_weights), self$trainable_weights)
      self$metrics[[1]]$update_state(loss)
      list(loss = self$metrics[[1]]$result())
    }
    methods <- list(
      initialize = function() {
        super$initialize()
        self$scores <- keras3::layer_dense(units = 3L, kernel_initializer = "ones")
      },
      call = function(inputs, training = FALSE) self$scores(inputs)
    )
    methods$train_step <- if (is_own) train_step
    model <- do.call(keras3::new_model_class, c(list("Flowers"), methods))()
    loss <- keras3::loss_sparse_categorical_crossentropy(from_logits = TRUE)
    keras3::compile(model, keras3::optimizer_adam(0.05), loss)
  }
  train <- function(is_own) {
    environment(build) <- rlang::env(globalenv(), is_own = is_own)
    barrier_train("local", data = iris_arrays(), model_fn = build, seed = 1, verbose = 0)
  }
  own <- train(TRUE)
  expect_equal(fit_weights(own), fit_weights(train(FALSE)), tolerance = 1e-6)
})

test_that("the layer, the callback or the argument with an R function is named", {
  skip_if_no_pybackend()
  skip_if_not_installed("keras3")
  new_model <- function(..., loss = "mse", metrics = NULL) {
    model <- keras3::keras_model_sequential(input_shape = 4L) |>
      keras3::layer_dense(1L, name = "scores", ...)
    keras3::compile(model, "sgd", loss, metrics)
  }
  halve <- function(epoch, lr) lr / 2
  new_callback <- keras3::Callback("Beeping", on_epoch_end = function(epoch, logs = NULL) 1)
  new_layer <- keras3::new_layer_class("Twice", call = function(inputs) 2 * inputs)
  with_layer <- keras3::keras_model_sequential(input_shape = 4L) |>
    new_layer(name = "doubled") |>
    keras3::layer_dense(1L)
  keras3::compile(with_layer, "sgd", "mse")
  error <- function(y_true, y_pred) keras3::op_mean(y_true - y_pred)
  train <- function(model, ...) barrier_train("local", model, list(x, x[, 1]), ..., workers = 2)
  x <- matrix(0, 8L, 4L)
  expect_snapshot(error = TRUE, {
    train(new_model(loss = error, metrics = list(keras3::custom_metric("bias", error))))
    train(new_model(activation = function(x) x, kernel_regularizer = function(x) 0))
    train(with_layer)
    train(new_model(), callbacks = keras3::callback_lambda(on_epoch_end = halve))
    train(new_model(), callbacks = keras3::callback_learning_rate_scheduler(halve))
    train(new_model(), callbacks = list(new_callback()))
    train(new_model(), callbacks = list(halve))
    train(new_model(), model_options = model_options(custom_objects = list(halve = halve)))
    barrier_evaluate("local", new_model(loss = error), list(x, x[, 1]))
    barrier_predict("local", new_model(activation = function(x) x), x)
  })
})
