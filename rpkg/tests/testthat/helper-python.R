# With TFDIST_TEST_REQUIRE=1 a test that cannot run fails, so that CI never passes by skipping.
skip_or_fail <- function(reason) {
  if (identical(Sys.getenv("TFDIST_TEST_REQUIRE"), "1")) {
    stop("TFDIST_TEST_REQUIRE=1, but ", reason, call. = FALSE)
  }
  skip(toupper(reason))
}

skip_if_no_pybackend <- function() {
  if (!has_pybackend()) {
    skip_or_fail(paste("pybackend is missing:", describe_python(running_python())))
  }
}

# A linear model of known size: 4 inputs, 3 outputs.
dense_model <- function(inputs = 4L, units = 3L) {
  keras <- reticulate::import("keras")
  keras$utils$set_random_seed(7L)
  model <- keras$Sequential(list(
    keras$Input(reticulate::tuple(inputs)),
    keras$layers$Dense(8L, activation = "relu"),
    keras$layers$Dense(units)
  ))
  model$compile(
    optimizer = keras$optimizers$Adam(0.01),
    loss = keras$losses$SparseCategoricalCrossentropy(from_logits = TRUE),
    metrics = list("accuracy")
  )
  model
}

# Convert logits to probabilities.
softmax <- function(scores) exp(scores) / rowSums(exp(scores))

iris_arrays <- function() {
  list(as.matrix(iris[1:4]), as.integer(iris$Species) - 1L)
}

# One worker, so that the result is that of Keras alone.
train_flowers <- function(data, ...) {
  suppressMessages(barrier_train(
    "local",
    dense_model(),
    data,
    ...,
    label = "Species",
    workers = 1,
    seed = 1,
    verbose = 0
  ))
}

# The loss and metrics of Keras's own evaluate() in this process.
evaluate_here <- function(model, data) {
  x <- as_input(data[[1L]], as_feature_array)
  y <- as_input(data[[2L]], as_label_array)
  unlist(model$evaluate(x, y, verbose = 0L, return_dict = TRUE))
}

# The network of train_mnist() on a few images.
seed_fit <- function(sc) {
  train_mnist(sc, workers = 2, epochs = 1, batch_size = 32, limit = 256, seed = 3, verbose = 0)
}

# The columns that barrier_train() would use with these arguments; `...` are data options.
columns_of <- function(label = "label", features = NULL, weight = NULL, ...) {
  column_spec(label, features, weight, data_options(...))
}

# Expect the arguments of an R function, without `except`, and their defaults to be Python's.
expect_same_arguments <- function(r, python, except = character()) {
  inspect <- reticulate::import("inspect")
  parameters <- inspect$signature(pybackend()[[python]])$parameters
  parameters <- lapply(reticulate::iterate(parameters$values()), identity)
  names(parameters) <- vapply(parameters, function(parameter) parameter$name, "")
  arguments <- formals(r)
  arguments <- arguments[!names(arguments) %in% c("...", except)]
  expect_setequal(names(arguments), setdiff(names(parameters), except))
  for (name in names(arguments)) {
    if (rlang::is_missing(arguments[[name]])) {
      expect_equal(parameters[[name]]$default, inspect$Parameter$empty, info = name)
    } else {
      expect_equal(eval(arguments[[name]]), parameters[[name]]$default, info = name)
    }
  }
}

# A fit with values as from Python, made without Python.
example_fit <- function(validation = TRUE, levels = NULL) {
  history <- list(loss = c(1.5, 0.75), accuracy = c(0.5, 0.875))
  if (validation) {
    history <- c(history, list(val_loss = c(1.25, 1), val_accuracy = c(0.625, 0.75)))
  }
  worker <- function(rank) {
    list(
      rank = rank,
      host = "node",
      pid = 100L + rank,
      rows = 50L,
      steps = 4L,
      seconds = 1.5,
      waited = 1.25 * rank,
      ok = TRUE
    )
  }
  answer <- list(
    history = history,
    workers = list(worker(0L), worker(1L)),
    metrics = rlang::set_names(list()),
    epochs = 2L,
    seconds = 3.25,
    seed = 1L,
    straggler = list(0L, 1.25),
    model_base64 = strrep("QUJD", 1000),
    model_format = "h5",
    model_sha256 = strrep("0123456789abcdef", 4)
  )
  new_fit(list(to_dict = function() answer), list(levels = levels))
}

# Expect that an R function that fails on one worker ends the other, with the rank in its error.
expect_worker_error <- function(sc) {
  condition <- tryCatch(
    barrier_apply(
      sc,
      function(ctx) {
        parse_row <- function(row) stop("row ", row, " is bad")
        if (ctx$rank == 1) {
          parse_row(17)
        }
        Sys.sleep(100)
      },
      workers = 2,
      verbose = 0
    ),
    tfdist_error = identity
  )
  expect_s3_class(condition, "tfdist_error_worker_failed")
  expect_identical(condition$rank, 1L)
  expect_match(conditionMessage(condition), "row 17 is bad")
  expect_match(condition$traceback, "parse_row(17)", fixed = TRUE)
}

# A test of `make test-full` only: exhaustive, or expensive for what it finds. In `make test` it is
# skipped, or testthat would remove its snapshots; scripts/r-test.R does not count it.
test_full <- function(desc, code) {
  if (runs_full()) {
    eval.parent(substitute(test_that(desc, code)))
  } else {
    test_that(desc, skip("run by make test-full"))
  }
}

runs_full <- function() !identical(Sys.getenv("TFDIST_TEST_FULL"), "0")
