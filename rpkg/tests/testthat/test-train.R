test_that("set.seed() decides the seed", {
  route <- list(kind = "local", sc = "local")
  withr::with_seed(3, first <- c(draw_seed(route), draw_seed(route)))
  withr::with_seed(3, expect_identical(c(draw_seed(route), draw_seed(route)), first))
  expect_true(first[[1L]] != first[[2L]])
  withr::with_seed(3, expect_null(draw_seed(list(kind = "local", sc = NULL))))
})

test_that("bad arguments are errors before the model is built", {
  skip_if_no_pybackend()
  made <- function() stop("must not be called")
  expect_snapshot(error = TRUE, {
    barrier_train("local", made, iris, label = "Species", workers = "two")
    barrier_train("local", made, iris, label = "Species", workers = 0)
    barrier_train("local", made, iris, label = "Species", epochs = 1.5)
    barrier_train("local", made, iris, label = "Species", batch_size = -1)
    barrier_train("local", made, iris, label = "Species", steps_per_epoch = 0)
    barrier_train("local", made, iris, label = "Species", seed = "lucky")
    barrier_train("local", made, iris, label = "Species", shuffle = "yes")
    barrier_train("local", made, iris, label = "Species", class_weight = c(1, 2))
    barrier_train("local", made, iris, label = "Species", class_weight = c(rose = 2))
    barrier_train("local", made, iris, label = "Species", exchange = "tcp")
    barrier_train("local", made, iris, label = "Species", data_options = list(in_memory = TRUE))
    barrier_train("local", made, iris, label = "Species", initial_epoch = -1)
    barrier_train("local", made, iris, label = "Species", validation_split = 1)
    barrier_train("local", made, iris, label = "Species", validation_freq = 0)
    barrier_train("local", made, iris, label = "Species", features = list("Sepal.Width"))
    barrier_train("local", made, iris, label = "Species", weight = "n")
    barrier_train("local", made, iris, label = "Species", exchange = 3)
    barrier_train("local", made, iris, label = "Species", roles = c(boss = 1))
    barrier_evaluate("local", made, iris, label = "Species", workers = elastic(2))
    barrier_train("local", made, "absent.parquet")
    barrier_train("local", made, function() 1)
    barrier_train("local", made, iris, label = "Species", timeout = 0)
    barrier_train("local", made, iris, label = "Species", verbose = 9)
    barrier_train("local", made, iris, label = "Species", callbacks = "stop")
    barrier_train("local", made, iris, label = "Species", epoch = 3)
    barrier_train("local", made, iris)
    barrier_train("local", "model", iris, label = "Species")
    barrier_train("local", made, 1:10)
    barrier_train("spark://host:7077", made, iris, label = "Species")
    train_mnist(workers = "three")
    train_mnist(limit = 0)
    train_mnist(epoch = 2)
  })
})

test_that("wrong combinations of arguments are errors before Python is used", {
  made <- function() stop("must not be called")
  weighted <- list(as.matrix(iris[1:4]), iris$Species, rep(1, 150))
  table <- structure(list(), class = c("tbl_spark", "tbl_sql", "tbl_lazy", "tbl"))
  expect_snapshot(error = TRUE, {
    barrier_train(
      "local",
      made,
      iris_arrays(),
      validation_split = 0.2,
      validation_data = iris_arrays()
    )
    barrier_train("local", made, function(ctx) 1, validation_split = 0.2)
    check_validation_split(0.2, list(kind = "table"), NULL)
    check_validation_split(0.2, list(kind = "path"), NULL)
    barrier_train("local", made, weighted, class_weight = c(setosa = 2))
    check_shuffled(list(kind = "table"), "global")
    barrier_train("local", made, function(ctx) 1, shuffle = "global")
    barrier_train("local", made, function(ctx) 1, class_weight = c("0" = 1))
  })
})

test_that("R and Python have the same arguments and defaults", {
  skip_if_no_pybackend()
  except <- c("sc", "spark", "model", "model_fn", "data", "x", "formula")
  for (name in c("barrier_train", "barrier_evaluate", "barrier_predict", "train_mnist")) {
    expect_same_arguments(name, name, c(except, if (name == "barrier_predict") "levels"))
  }
})

test_that("parameter servers and an elastic number of workers reach Python", {
  skip_if_no_pybackend()
  train <- function(...) barrier_train("local", dense_model, iris_arrays(), verbose = 0, ...)
  expect_error(
    train(strategy = "mirrored"),
    "exchange = parameter_server(servers = 1)",
    fixed = TRUE
  )
  one <- parameter_server()
  expect_error(train(exchange = one, steps_per_epoch = 3), "one step for each batch")
  servers <- parameter_server(servers = 4000)
  expect_error(train(exchange = servers, workers = 99), "must be from 1 to 95")
  nodes <- slurm("part", nodes = 2, options = list("ntasks-per-node" = 1))
  train <- function(...) barrier_train(nodes, dense_model, iris_arrays(), verbose = 0, ...)
  expect_error(train(workers = elastic(2, max = 3)), "but the number of workers is 3")
})

test_that("two workers train on arrays, and the fit has all of it", {
  skip_if_no_pybackend()
  fit <- barrier_train(
    "local",
    dense_model,
    iris_arrays(),
    workers = 2,
    epochs = 2,
    batch_size = 16,
    seed = 1,
    validation_data = iris_arrays(),
    verbose = 0
  )
  expect_s3_class(fit, "tfdist_fit")
  expect_named(fit$history, c("loss", "accuracy", "val_loss", "val_accuracy"), ignore.order = TRUE)
  expect_true(all(lengths(fit$history) == 2))
  expect_identical(sum(fit$workers$rows), 150L)
  expect_identical(fit$seed, 1L)
  expect_identical(nrow(as.data.frame(fit)), 8L)
  expect_gt(fit$audit$steps, 0L)
  expect_lt(max(fit$audit$weights, fit$audit$metrics), 2e-5)
  expect_identical(fit$audit$skipped, character())
  expect_output(
    print(fit),
    "audit +[0-9]+ of 10 steps against one process, largest relative difference"
  )

  scores <- predict(fit, iris_arrays()[[1]])
  expect_identical(dim(scores), c(150L, 3L))
  expect_identical(fit$model, fit$model)

  path <- withr::local_tempfile(fileext = ".rds")
  saveRDS(fit, path)
  again <- readRDS(path)
  # As in a new session, without the decoded model.
  rm("model", envir = .subset2(again, "decoded"))
  expect_equal(predict(again, iris_arrays()[[1]]), scores)

  file <- withr::local_tempfile(fileext = ".h5")
  write_model(fit, file)
  expect_gt(file.size(file), 1000)

  # With the state of the optimizer, also in the other format.
  other <- withr::local_tempfile(fileext = ".keras")
  write_model(again, other)
  written <- reticulate::import("keras")$saving$load_model(other)
  expect_equal(written$get_weights(), fit$model$get_weights())
  expect_equal(as.integer(written$optimizer$iterations$numpy()), 10L)
})

test_that("a model of two inputs takes them by name", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  left <- keras$Input(reticulate::tuple(2L), name = "left")
  right <- keras$Input(reticulate::tuple(2L), name = "right")
  joined <- keras$layers$Concatenate()(list(left, right))
  model <- keras$Model(
    reticulate::py_dict(c("left", "right"), list(left, right)),
    keras$layers$Dense(3L)(joined)
  )
  model$compile(optimizer = "sgd", loss = "mse")
  x <- list(right = as.matrix(iris[3:4]), left = as.matrix(iris[1:2]))
  y <- matrix(seq_len(450) / 450, 150)
  fit <- barrier_train("local", model, list(x = x, y = y), workers = 1, verbose = 0)
  expect_identical(dim(predict(fit, x)), c(150L, 3L))
})

test_full("inputs without labels train as by Keras's fit(x)", {
  skip_if_no_pybackend()
  main <- reticulate::py_run_string(paste(
    "import keras, tensorflow as tf",
    "class Autoencoder(keras.Model):",
    "    def __init__(self, **options):",
    "        super().__init__(**options)",
    "        self.coder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])",
    "        self.tracker = keras.metrics.Mean(name='loss')",
    "    @property",
    "    def metrics(self):",
    "        return [self.tracker]",
    "    def train_step(self, data):",
    "        data = data['sepal'] if isinstance(data, dict) else data",
    "        with tf.GradientTape() as tape:",
    "            loss = keras.ops.mean((data - self.coder(data)) ** 2)",
    "        weights = self.trainable_weights",
    "        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))",
    "        self.tracker.update_state(loss)",
    "        return {'loss': self.tracker.result()}",
    sep = "\n"
  ))
  autoencoder <- function() {
    reticulate::import("keras")$utils$set_random_seed(1L)
    model <- main$Autoencoder()
    model$compile(optimizer = "sgd")
    model
  }
  x <- as.matrix(iris[1:4])
  expected <- autoencoder()
  fitted <- expected$fit(
    reticulate::np_array(x, "float32"),
    batch_size = 50L,
    shuffle = FALSE,
    verbose = 0L
  )
  fit <- function(data, ...) {
    barrier_train(
      "local",
      autoencoder(),
      data,
      ...,
      workers = 2,
      batch_size = 25,
      shuffle = FALSE,
      verbose = 0
    )
  }
  expect_trained <- function(fit) {
    expect_equal(fit$model$get_weights(), expected$get_weights(), tolerance = 1e-6)
    expect_equal(fit$history$loss, as.numeric(fitted$history$loss), tolerance = 1e-6)
  }
  expect_trained(fit(x))
  expect_trained(fit(iris[1:4], label = NULL))
  expect_trained(fit(list(sepal = x, other = x)))
})

test_that("a loss of labels needs them", {
  skip_if_no_pybackend()
  expect_error(
    barrier_train("local", dense_model(), as.matrix(iris[1:4]), verbose = 0),
    "`data` has no labels, but the model is compiled with `loss`",
    class = "tfdist_error_input"
  )
})

test_full("a data frame trains as its arrays do", {
  skip_if_no_pybackend()
  train <- function(data) {
    barrier_train(
      NULL,
      dense_model(),
      data,
      label = "Species",
      workers = 1,
      seed = 1,
      verbose = 0
    )
  }
  # The meaning of the codes is shown before the training, or not at all.
  expect_message(
    expect_error(
      barrier_train(NULL, function() stop("built"), iris, label = "Species"),
      "built"
    ),
    "setosa = 0"
  )
  expect_no_message(frame <- train(iris))
  arrays <- train(iris_arrays())
  expect_equal(frame$model$get_weights(), arrays$model$get_weights(), tolerance = 1e-6)
  scores <- predict(frame, iris[1:3, ], type = "raw")
  expect_identical(colnames(scores), levels(iris$Species))
  expect_equal(scores, predict(frame, as.matrix(iris[1:3, 1:4])), tolerance = 1e-6)
})

test_full("the last rows of a data frame are kept for validation, after some of the epochs", {
  skip_if_no_pybackend()
  train <- function(data, ...) {
    train_flowers(data, ..., epochs = 3, initial_epoch = 1, validation_freq = 2)
  }
  # The last fifth has one species, whose code is that of all rows.
  split <- train(iris, validation_split = 0.2)
  given <- train(iris[1:120, ], validation_data = iris[121:150, ])
  expect_length(split$history$loss, 2L)
  expect_length(split$history$val_loss, 1L)
  expect_identical(sum(split$workers$rows), 120L)
  expect_equal(split$history, given$history, tolerance = 1e-6)
})

test_full("class weights are matched by name or code", {
  skip_if_no_pybackend()
  by_level <- train_flowers(iris, class_weight = c(virginica = 5, setosa = 0))
  by_code <- train_flowers(iris_arrays(), class_weight = list("0" = 0, "2" = 5))
  weights <- c(0, 1, 5)[as.integer(iris$Species)]
  by_row <- train_flowers(c(iris_arrays(), list(weights)))
  expect_equal(by_level$model$get_weights(), by_row$model$get_weights(), tolerance = 1e-6)
  expect_equal(by_code$model$get_weights(), by_row$model$get_weights(), tolerance = 1e-6)
})

test_full("how gradients travel does not change the result", {
  skip_if_no_pybackend()
  train <- function(...) {
    barrier_train("local", dense_model(), iris_arrays(), ..., seed = 1, verbose = 0)
  }
  plain <- train()
  once <- exchange(bucket_mb = Inf)
  split <- train(exchange = once, shuffle = "shard")
  expect_equal(split$model$get_weights(), plain$model$get_weights(), tolerance = 1e-6)
  whole <- train(exchange = exchange(loss_over = "global batch"))
  expect_equal(whole$model$get_weights(), plain$model$get_weights(), tolerance = 1e-6)
  collectives <- train(exchange = exchange(transport = "tf"))
  expect_equal(collectives$model$get_weights(), plain$model$get_weights(), tolerance = 1e-5)
})

test_that("local steps, compression and global shuffling reach the workers", {
  skip_if_no_pybackend()
  fit <- barrier_train(
    "local",
    dense_model(),
    iris_arrays(),
    workers = 2,
    shuffle = "global",
    exchange = local_steps(2, learning_rate = 0.7, momentum = 0.9, compression = "bf16"),
    seed = 1,
    verbose = 0
  )
  expect_length(fit$history$loss, 1L)
  expect_identical(sum(fit$workers$rows), 150L)
})

test_that("a failure in a worker is a condition with rank, host, traceback and log", {
  skip_if_no_pybackend()
  main <- reticulate::py_run_string(paste(
    "import keras",
    "class Failing(keras.callbacks.Callback):",
    "    def on_train_begin(self, logs=None):",
    "        print('about to fail')",
    "        raise RuntimeError('the callback failed')",
    sep = "\n"
  ))
  condition <- tryCatch(
    barrier_train(
      "local",
      dense_model,
      iris_arrays(),
      workers = 1,
      callbacks = list(main$Failing()),
      verbose = 0
    ),
    tfdist_error = identity
  )
  expect_s3_class(condition, "tfdist_error_worker_failed")
  expect_identical(condition$rank, 0L)
  expect_type(condition$host, "character")
  expect_identical(condition$exception_type, "RuntimeError")
  expect_match(condition$traceback, "the callback failed")
  expect_match(paste(condition$log, collapse = "\n"), "about to fail")
  states <- condition$timeline$state
  expect_identical(states[[1L]], "started")
  expect_identical(condition$timeline$reason[states == "failed"], "the callback failed")
  expect_match(conditionMessage(condition), "the callback failed")
})

test_that("what Python rejects is an input error", {
  skip_if_no_pybackend()
  expect_error(
    barrier_train("local", dense_model, iris_arrays(), workers = 151, verbose = 0),
    class = "tfdist_error_input"
  )
})

test_that("MNIST trains in one call", {
  skip_if_no_pybackend()
  fit <- train_mnist("local", workers = 2, epochs = 1, limit = 640, verbose = 0)
  expect_named(fit$metrics, c("test_loss", "test_accuracy"), ignore.order = TRUE)
  expect_identical(nrow(fit$workers), 2L)
})

test_full("Python alone gives the same model from the same seed", {
  skip_if_no_pybackend()
  code <- paste(
    "import pybackend",
    "r = pybackend.train_mnist('local', workers=2, epochs=1, batch_size=32, limit=256, seed=3,",
    "  verbose=0)",
    "print(r.model_sha256)",
    sep = "\n"
  )
  script <- withr::local_tempfile(lines = code, fileext = ".py")
  digest <- system2(reticulate::py_exe(), script, stdout = TRUE, stderr = FALSE)
  expect_identical(seed_fit("local")$model_sha256, utils::tail(digest, 1))
})

test_full("a session of several trains with them, or alone if it says so", {
  skip_if_no_pybackend()
  withr::local_envvar(TF_CONFIG = make_tf_config(c("10.0.0.1:2222", "10.0.0.2:2222"), 0))
  withr::local_envvar(TFDIST_SECRET = "a secret of this test")
  expect_error(
    barrier_train(NULL, dense_model(), iris_arrays(), workers = 1, verbose = 0),
    "2 processes were started to train together",
    class = "tfdist_error_input"
  )
  fit <- barrier_train("local", dense_model(), iris_arrays(), workers = 1, verbose = 0)
  expect_length(fit$history$loss, 1)
})

test_full("text reaches a model that looks it up, from lists and data frames", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  color <- keras$Input(reticulate::tuple(1L), dtype = "string", name = "color")
  size <- keras$Input(reticulate::tuple(1L), name = "size")
  words <- keras$layers$StringLookup(vocabulary = list("red", "green"), output_mode = "one_hot")
  joined <- keras$layers$Concatenate()(list(words(color), size))
  model <- keras$Model(list(color = color, size = size), keras$layers$Dense(2L)(joined))
  model$compile("sgd", keras$losses$SparseCategoricalCrossentropy(from_logits = TRUE))

  rows <- data.frame(
    color = rep(c("red", "green", "blue", "red"), 4),
    size = seq(0, 1, length.out = 16),
    label = rep(0:1, 8)
  )
  train <- function(data, ...) {
    barrier_train("local", model, data, ..., workers = 2, shuffle = FALSE, verbose = 0)
  }
  inputs <- list(color = rows$color, size = rows$size)
  of_list <- train(list(inputs, rows$label))
  of_frame <- train(rows, features = list(color = "color", size = "size"))
  expect_equal(of_frame$history$loss, of_list$history$loss)
  tensors <- list(
    color = reticulate::import("tensorflow")$constant(matrix(rows$color)),
    size = matrix(rows$size)
  )
  model$fit(tensors, as_label_array(rows$label), batch_size = 64L, shuffle = FALSE, verbose = 0L)
  expect_equal(of_list$model$get_weights(), model$get_weights(), tolerance = 1e-6)

  scores <- predict(of_list, inputs)
  expect_equal(scores, as.matrix(model$predict(tensors, verbose = 0L)), tolerance = 1e-6)
  expect_equal(predict(of_frame, rows, type = "raw"), scores, tolerance = 1e-6)
  expect_equal(
    barrier_predict("local", of_frame, rows, type = "raw", workers = 2, verbose = 0),
    scores,
    tolerance = 1e-6
  )
  expect_equal(
    barrier_evaluate("local", of_frame, rows, workers = 2, verbose = 0)[["loss"]],
    evaluate.tfdist_fit(of_list, inputs, rows$label)[["loss"]],
    tolerance = 1e-6
  )
  expect_error(
    barrier_predict("local", dense_model(), c("red", "blue"), workers = 1),
    "contains strings, but no input of the model takes strings"
  )
})

two_outputs <- function() {
  keras <- reticulate::import("keras")
  x <- keras$Input(reticulate::tuple(2L))
  outputs <- list(
    kind = keras$layers$Dense(3L, activation = "softmax", name = "kind")(x),
    size = keras$layers$Dense(1L, name = "size")(x)
  )
  model <- keras$Model(x, outputs)
  model$compile("sgd", loss = list(kind = "sparse_categorical_crossentropy", size = "mse"))
  model
}

test_full("several outputs have their labels from several columns", {
  skip_if_no_pybackend()
  rows <- data.frame(
    a = iris$Sepal.Length,
    b = iris$Sepal.Width,
    species = iris$Species,
    width = iris$Petal.Width
  )
  keras <- reticulate::import("keras")
  keras$utils$set_random_seed(1L)
  model <- two_outputs()
  train <- function(data, ...) {
    suppressMessages(barrier_train("local", model, data, ..., workers = 1, seed = 1, verbose = 0))
  }
  x <- as.matrix(rows[1:2])
  y <- list(kind = as.integer(rows$species) - 1L, size = rows$width)
  expected <- train(list(unname(x), y))
  fit <- train(rows, label = list(kind = species, size = width))
  expect_equal(fit$history, expected$history, tolerance = 1e-6)
  expect_identical(fit$features, c("a", "b"))
  # Levels in another order have the codes of the training.
  rows$species <- factor(rows$species, rev(levels(rows$species)))
  again <- barrier_evaluate("local", fit, rows, label = list(kind = "species", size = "width"))
  known <- barrier_evaluate("local", expected, list(unname(x), y))
  expect_equal(again, known, tolerance = 1e-5)
  expect_equal(generics::evaluate(fit, rows)[["loss"]], known[["loss"]], tolerance = 1e-5)
  expect_snapshot(error = TRUE, {
    train(rows, label = list(kind = spcies, size = width))
    train(rows, label = list(species, width))
  })
})

test_that("levels that the loss cannot tell apart are an error", {
  skip_if_no_pybackend()
  numbers <- function(units, loss) {
    keras <- reticulate::import("keras")
    layers <- list(keras$Input(reticulate::tuple(1L)), keras$layers$Dense(units))
    model <- keras$Sequential(layers)
    model$compile("sgd", loss)
    model
  }
  rows <- data.frame(a = 1:6, text = rep(c("9", "10", "100"), 2))
  rows$k <- factor(rep(c("p", "q"), 3), c("p", "q", "z"))
  train <- function(model, formula) {
    suppressMessages(barrier_train("local", model, rows, formula, workers = 1, verbose = 0))
  }
  expect_snapshot(error = TRUE, {
    train(numbers(1L, "mse"), text ~ a)
    train(numbers(2L, "sparse_categorical_crossentropy"), k ~ a)
    train(numbers(2L, "binary_crossentropy"), k ~ a)
  })
})
