test_that("a fit is written as a whole, and read in R and in Python", {
  skip_if_no_pybackend()
  fit <- train_flowers(iris, epochs = 1)
  path <- withr::local_tempfile(fileext = ".json")
  expect_identical(write_model(fit, path), path)
  again <- read_fit(path)
  same <- c("history", "workers", "levels", "features", "feature_names", "label", "seed", "audit")
  for (name in c(same, "model_base64", "epochs")) {
    expect_equal(again[[name]], fit[[name]], info = name)
  }
  expect_equal(predict(again, iris), predict(fit, iris))
  in_python <- reticulate::import("pybackend.types")$TrainResult$load(path)
  expect_identical(as.character(in_python$levels), levels(iris$Species))
  other <- withr::local_tempfile(fileext = ".json")
  in_python$save(other)
  expect_equal(predict(read_fit(other), rev(iris)), predict(fit, iris))
  fit$preparation <- list()
  expect_error(write_model(fit, path), "Use `saveRDS\\(\\)`", class = "tfdist_error_input")
  expect_error(
    read_fit("absent.json"),
    "There is no file absent.json",
    class = "tfdist_error_input"
  )
})

test_that("ordered levels and the names of label columns are written, too", {
  skip_if_no_pybackend()
  path <- withr::local_tempfile(fileext = ".json")
  rows <- iris
  rows$Species <- factor(rows$Species, rev(levels(iris$Species)), ordered = TRUE)
  fit <- train_flowers(rows, epochs = 1)
  classes <- predict(read_fit(write_model(fit, path)), rows)$.pred_class
  expect_s3_class(classes, "ordered")
  expect_identical(classes, predict(fit, rows)$.pred_class)

  keras <- reticulate::import("keras")
  inputs <- keras$Input(reticulate::tuple(4L))
  outputs <- list(
    kind = keras$layers$Dense(3L, "softmax", name = "kind")(inputs),
    size = keras$layers$Dense(2L, name = "size")(inputs)
  )
  model <- keras$Model(inputs, outputs)
  model$compile("sgd", list(kind = "sparse_categorical_crossentropy", size = "mse"))
  labels <- list(kind = rows$Species, size = as.matrix(iris[3:4]))
  data <- list(as.matrix(iris[1:4]), labels)
  fit <- barrier_train("local", model, data, workers = 1, epochs = 1, seed = 1, verbose = 0)
  again <- predict(read_fit(write_model(fit, path)), iris[1:4], type = NULL)
  expect_identical(again, predict(fit, iris[1:4], type = NULL))
  expect_s3_class(again$.pred_kind_class, "ordered")
  expect_contains(names(again), c(".pred_size_Petal.Length", ".pred_size_Petal.Width"))
})

test_that("arguments are checked before Python is used", {
  expect_snapshot(error = TRUE, {
    model_to_base64("model")
    model_from_base64(3)
    model_from_base64("abc", sha256 = "12")
    write_model(1:3, "model.h5")
    write_model("QUJD", "model.rds")
    write_model("QUJD", "no/such/directory/model.h5")
    write_model(example_fit())
    write_model("QUJD", "model.onnx")
    write_model(example_fit(), "no/such/directory/model.onnx")
    write_model(example_fit(), "no/such/directory/fit.json")
    write_model("model.keras", "copy.h5")
    barrier_train("local", "models/model.keras", iris)
    barrier_predict("local", "fit.json", iris)
  })
  folder <- withr::local_tempdir()
  Sys.chmod(folder, "500")
  # Root may write there.
  if (file.access(folder, 2L) != 0L) {
    expect_error(
      write_model(example_fit(), file.path(folder, "model.onnx")),
      "You do not have permission",
      class = "tfdist_error_input"
    )
  }
})

test_that("weights alone are not written as a model", {
  fit <- example_fit()
  fit$model_format <- "weights.h5"
  expect_snapshot(error = TRUE, {
    write_model(fit, "model.h5")
    write_model(fit, "model.keras")
  })
})

test_that("a model function takes no arguments", {
  expect_no_error(check_model(function() 1))
  expect_no_error(check_model(function(units = 3, ...) 1))
  expect_snapshot(error = TRUE, {
    check_model(function(units) 1, arg = "model")
    check_model(NULL, arg = "model")
    check_model(list(), arg = "model")
  })
})

test_that("a model function must return a model", {
  expect_snapshot(error = TRUE, {
    as_python_model(function() 3)
    as_python_model(function() NULL)
  })
})

test_that("a model survives the round trip through text and file", {
  skip_if_no_pybackend()
  model <- dense_model()
  text <- model_to_base64(model)
  expect_type(text, "character")
  again <- model_from_base64(text)
  expect_equal(again$get_weights(), model$get_weights())
  path <- withr::local_tempfile(fileext = ".h5")
  expect_identical(write_model(text, path), path)
  keras <- reticulate::import("keras")
  expect_equal(keras$saving$load_model(path)$get_weights(), model$get_weights())
  expect_invisible(write_model(model, withr::local_tempfile(fileext = ".keras")))
})

test_that("broken text is a serialization error", {
  skip_if_no_pybackend()
  text <- model_to_base64(dense_model())
  expect_error(model_from_base64("nonsense!"), class = "tfdist_error_serialization")
  expect_error(
    model_from_base64(substr(text, 1, 400)),
    class = "tfdist_error_serialization"
  )
  expect_error(
    model_from_base64(text, sha256 = strrep("0", 64)),
    class = "tfdist_error_serialization"
  )
})

test_full("a model becomes an ONNX file that computes the same", {
  skip_if_no_pybackend()
  path <- file.path(withr::local_tempdir(), "flowers.onnx")
  fit <- train_flowers(iris)
  expect_identical(write_model(fit, path), path)
  session <- reticulate::import("onnxruntime")$InferenceSession(path)
  x <- reticulate::np_array(as.matrix(unname(iris[1:4])), "float32")
  name <- session$get_inputs()[[1L]]$name
  found <- session$run(NULL, reticulate::py_dict(name, list(x)))[[1L]]
  expect_equal(found, fit_model(fit)$predict(x, verbose = 0L), tolerance = 1e-5)
})
