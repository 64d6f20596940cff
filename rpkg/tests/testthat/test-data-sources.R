# Files, functions and named columns as training data, without Spark.

write_parquet <- function(rows, path) {
  # Made by pandas; reticulate converts it to a data frame.
  reticulate::r_to_py(rows)$to_parquet(path, index = FALSE)
}

flowers <- function() {
  rows <- stats::setNames(iris, c("sepal_l", "sepal_w", "petal_l", "petal_w", "species"))
  rows$species <- as.character(rows$species)
  rows
}

# A model with two named inputs.
paired_model <- function(left = 2L, right = 2L) {
  keras <- reticulate::import("keras")
  keras$utils$set_random_seed(7L)
  inputs <- list(
    left = keras$Input(reticulate::tuple(left), name = "left"),
    right = keras$Input(reticulate::tuple(right), name = "right")
  )
  joined <- keras$layers$Concatenate()(unname(inputs))
  model <- keras$Model(inputs, keras$layers$Dense(3L)(joined))
  loss <- keras$losses$SparseCategoricalCrossentropy(from_logits = TRUE)
  model$compile(optimizer = "sgd", loss = loss)
  model
}

test_that("Parquet files train as the data frame does, with levels, features and weights", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  withr::local_dir(folder)
  rows <- flowers()
  rows$n <- rep(c(1, 2), 75)
  write_parquet(rows, "rows.parquet")

  expect_no_message(
    files <- barrier_train(
      "local",
      dense_model(),
      "rows.parquet",
      label = "species",
      weight = "n",
      shuffle = FALSE,
      workers = 1,
      seed = 1,
      verbose = 0,
      validation_data = rows[c(1, 60, 120), ],
      data_options = data_options(categories = list(species = levels(iris$Species)))
    )
  )
  expect_identical(files$levels, levels(iris$Species))
  expect_identical(files$features, names(rows)[1:4])
  expect_length(files$history$val_loss, 1L)

  frame <- suppressMessages(barrier_train(
    "local",
    dense_model(),
    rows,
    label = "species",
    weight = "n",
    shuffle = FALSE,
    workers = 1,
    seed = 1,
    verbose = 0
  ))
  expect_equal(fit_weights(frame), fit_weights(files), tolerance = 1e-6)
  expect_identical(frame$levels, files$levels)

  # Two workers, in memory; Python derives the levels of text.
  expect_message(
    fit <- barrier_train(
      "local",
      dense_model(),
      file.path(folder, "rows.parquet"),
      label = "species",
      features = names(rows)[1:4],
      data_options = data_options(in_memory = TRUE, repartition = FALSE),
      seed = 1,
      verbose = 1
    ),
    "setosa = 0"
  )
  expect_identical(fit$levels, levels(iris$Species))
  expect_identical(sum(fit$workers$rows), 150L)
  expect_identical(levels(predict(fit, rows[1:3, ])$.pred_class), fit$levels)

  # The codes of some of the rows come from the levels of the fit.
  last <- rows[101:150, ]
  write_parquet(last, "last.parquet")
  on_frame <- barrier_evaluate("local", fit, last, label = "species")
  on_file <- barrier_evaluate("local", fit, "last.parquet", label = "species")
  expect_equal(on_file, on_frame, tolerance = 1e-5)
  codes <- list(as.matrix(last[1:4]), rep(2L, 50))
  expect_equal(on_frame, evaluate_here(fit$model, codes)[names(on_frame)], tolerance = 1e-5)
  expect_error(
    barrier_evaluate("local", fit$model, "last.parquet", label = "species"),
    "list its values in order",
    class = "tfdist_error_input"
  )
})

test_full("named inputs and categories, of a data frame and of files", {
  skip_if_no_pybackend()
  rows <- flowers()
  rows$species <- as.integer(iris$Species) - 1L
  rows$size <- ifelse(rows$sepal_l > 5.8, "large", "small")
  path <- withr::local_tempfile(fileext = ".parquet")
  write_parquet(rows, path)
  features <- list(left = c("sepal_l", "size"), right = c("petal_l", "petal_w"))
  fit <- function(data) {
    barrier_train(
      "local",
      paired_model(),
      data,
      label = "species",
      features = features,
      data_options = data_options(categories = list(size = c("small", "large"))),
      shuffle = FALSE,
      workers = 1,
      seed = 1,
      verbose = 0
    )
  }
  from_frame <- fit(rows)
  from_file <- fit(path)
  expect_equal(fit_weights(from_file), fit_weights(from_frame), tolerance = 1e-6)
  expect_identical(from_file$features, features)
  expect_null(from_file$levels)
  expect_equal(predict(from_file, rows), predict(from_frame, rows), tolerance = 1e-6)
  expect_equal(
    barrier_evaluate("local", from_file, path, label = "species"),
    barrier_evaluate("local", from_file, rows, label = "species"),
    tolerance = 1e-5
  )
  expect_error(
    predict(from_file, transform(rows, size = "huge"), on_missing = "error"),
    "not one of its categories",
    class = "tfdist_error_input"
  )
})

test_full("tensors define how bytes and arrays are read", {
  skip_if_no_pybackend()
  path <- withr::local_tempfile(fileext = ".parquet")
  main <- reticulate::py_run_string(paste(
    "import numpy as np, pyarrow as pa, pyarrow.parquet as pq",
    "def write_images(path):",
    "    x = np.arange(40 * 6, dtype='uint8').reshape(40, 6)",
    "    words = [list(range(1, 1 + i % 4)) for i in range(40)]",
    "    image = pa.array([r.tobytes() for r in x])",
    "    pq.write_table(pa.table({'image': image, 'words': words, 'label': [0, 1] * 20}), path)",
    sep = "\n"
  ))
  main$write_images(path)
  keras <- reticulate::import("keras")
  image <- keras$Input(reticulate::tuple(2L, 3L), name = "image")
  words <- keras$Input(reticulate::tuple(NULL), name = "words", dtype = "int32")
  known <- keras$layers$GlobalAveragePooling1D()(keras$layers$Embedding(9L, 2L)(words))
  joined <- keras$layers$Concatenate()(list(keras$layers$Flatten()(image), known))
  model <- keras$Model(
    list(image = image, words = words),
    keras$layers$Dense(1L)(joined)
  )
  model$compile(loss = "mse")
  fit <- barrier_train(
    "local",
    model,
    path,
    features = list(image = "image", words = "words"),
    data_options = data_options(
      tensors = list(image = list("uint8", c(2, 3)), words = list("int32", NA))
    ),
    verbose = 0
  )
  expect_identical(sum(fit$workers$rows), 40L)
  # Columns known from the training need not be passed again.
  expect_type(barrier_evaluate("local", fit, path), "double")
})

test_full("an R function gives each worker its batches", {
  skip_if_no_pybackend()
  x <- as.matrix(iris[1:4])
  y <- as.integer(iris$Species) - 1L
  batches <- function(ctx) {
    tf <- reticulate::import("tensorflow")
    mine <- seq(ctx$rank + 1L, nrow(x), by = ctx$world_size)
    rows <- tf$data$Dataset$from_tensor_slices(reticulate::tuple(
      tf$constant(x[mine, ], dtype = "float32"),
      tf$constant(y[mine])
    ))
    rows$batch(16L)
  }
  fit <- barrier_train(
    "local",
    dense_model(),
    batches,
    workers = 2,
    seed = 1,
    validation_data = batches,
    verbose = 0
  )
  expect_identical(sum(fit$workers$rows), 150L)
  expect_length(fit$history$val_loss, 1L)
  figures <- barrier_evaluate("local", fit, batches)
  alone <- evaluate_here(fit$model, list(x, y))
  expect_equal(figures[names(alone)], alone, tolerance = 1e-5)
})

test_full("a function that fails is named", {
  skip_if_no_pybackend()
  condition <- tryCatch(
    barrier_train("local", dense_model(), function(ctx) stop("no rows here"), verbose = 0),
    tfdist_error = identity
  )
  expect_s3_class(condition, "tfdist_error_worker_failed")
  expect_match(conditionMessage(condition), "no rows here")
})

test_full("a model written to a URI is read from there", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  withr::local_dir(folder)
  fit <- barrier_train(
    "local",
    dense_model(),
    iris_arrays(),
    model_options = model_options("model.h5"),
    seed = 1,
    verbose = 0
  )
  expect_identical(fit$model_base64, "")
  expect_identical(fit$model_uri, file.path(getwd(), "model.h5"))
  expect_true(file.exists("model.h5"))
  sent <- barrier_train("local", dense_model(), iris_arrays(), seed = 1, verbose = 0)
  expect_equal(fit_weights(fit), fit_weights(sent))
  write_model(fit, "copy.h5")
  expect_identical(tools::md5sum("copy.h5")[[1L]], tools::md5sum("model.h5")[[1L]])
  expect_output(print(summary(fit)), "model.h5, SHA-256")

  # Like a fit that another session saved.
  rm("model", "result", envir = .subset2(fit, "decoded"))
  expect_equal(fit_weights(fit), fit_weights(sent))
  rm("model", envir = .subset2(fit, "decoded"))
  unlink("model.h5")
  expect_error(fit$model, "cannot be read", class = "tfdist_error_serialization")
  expect_error(write_model(fit, "again.h5"), class = "tfdist_error_serialization")
})
