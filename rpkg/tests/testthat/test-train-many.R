build <- function(units = 4L, rate = 0.01, fails = FALSE) {
  if (fails) {
    stop("there is no such model")
  }
  keras <- reticulate::import("keras")
  model <- keras$Sequential(list(
    keras$Input(reticulate::tuple(4L)),
    keras$layers$Dense(as.integer(units), activation = "relu"),
    keras$layers$Dense(3L, activation = "softmax")
  ))
  model$compile(
    keras$optimizers$Adam(rate),
    "sparse_categorical_crossentropy",
    metrics = list("accuracy")
  )
  model
}

test_that("wrong arguments of a search are refused by name", {
  train <- function(...) train_many("local", ..., data = iris, formula = Species ~ ., verbose = 0)
  expect_error(train(grid = list(units = 1)), "either `model` or `model_fn`")
  expect_error(train(3, grid = list(units = 1)), "`model` must be an R function")
  expect_error(train(build, grid = 3), "`grid` must be a data frame", class = "tfdist_error_input")
  expect_error(train(build, grid = list(3)), "`grid` must be a data frame")
  skip_if_no_pybackend()
  expect_error(
    train(build, grid = list(units = 1), prune = "best"),
    "`prune` must be NULL, \"median\""
  )
  expect_error(train(build, grid = list(units = 1), workers_per_trial = 0), "`workers_per_trial`")
  expect_error(train(build, grid = list(units = 1), on_trial = 3), "`on_trial` must be")
  expect_error(
    train(build, grid = list(size = 1)),
    "`grid` has `size`",
    class = "tfdist_error_input"
  )
  expect_error(train(build, grid = list(batch_size = 0)), "`batch_size` must be at least 1")
  pruned <- function(...) train(build, grid = list(units = 1), prune = list(...))
  expect_error(pruned("median", warmup_epochs = 0), "`warmup_epochs` must be at least 1")
  expect_error(pruned("halving", factor = 1), "`factor` must be at least 2")
})

test_that("a grid is a data frame, lists of values or rows", {
  rows <- list(list(a = 1, b = "x"), list(a = 2, b = "y"))
  expect_identical(check_grid(data.frame(a = 1:2 + 0, b = factor(c("x", "y")))), rows)
  expect_identical(check_grid(rows), rows)
  expect_identical(
    check_grid(list(a = 1:2, b = "x")),
    list(a = list(1L, 2L), b = list("x"))
  )
})

test_that("arguments have the names and defaults of Python's", {
  skip_if_no_pybackend()
  except <- c("sc", "spark", "model", "data", "formula", "model_fn", "study", "trials")
  expect_same_arguments("train_many", "train_many", except)
})

test_full("trials run at once, with the results of their own trainings", {
  skip_if_no_pybackend()
  seen <- list()
  trials <- train_many(
    "local",
    build,
    iris,
    Species ~ .,
    grid = list(list(units = 4, rate = 0.1), list(fails = TRUE), list(units = 6, batch_size = 50)),
    parallelism = 2,
    epochs = 2,
    seed = 3,
    resources = resources(cpus = 1),
    on_trial = function(trial) seen[[trial$number]] <<- trial,
    verbose = 0
  )
  expect_identical(trials$status, c("completed", "failed", "completed"))
  expect_match(trials$error[[2L]], "there is no such model")
  expect_identical(trials$units, c(4, NA, 6))
  expect_identical(seen[[3L]]$arguments, list(units = 6, batch_size = 50))
  alone <- suppressMessages(barrier_train(
    "local",
    function() build(4, 0.1),
    iris,
    Species ~ .,
    workers = 1,
    epochs = 2,
    seed = 3,
    resources = resources(cpus = 1),
    verbose = 0
  ))
  first <- best(trials, 1)
  expect_identical(first$history, alone$history)
  expect_identical(first$levels, levels(iris$Species))
  expect_equal(predict(first, iris[1:5, ]), predict(alone, iris[1:5, ]))
  expect_identical(trials$loss[[1L]], alone$history$loss[[2L]])
  losses <- trials$loss
  expect_identical(utils::tail(best(trials)$history$loss, 1L), min(losses, na.rm = TRUE))
  expect_identical(best(trials, metric = "accuracy", mode = "max")$epochs, 2L)
  expect_error(best(trials, metric = "auc"), "`metric` is \"auc\", but the trials have only loss")
  expect_error(best(trials, mode = "least"), "`mode` must be", class = "tfdist_error_input")
  expect_error(best(trials, 1, metric = "loss"), "either the number of a `trial`, or `metric`")
  shown <- utils::capture.output(print(trials))
  expect_match(shown[[1L]], "<tfdist_trials> 3 trials \\(2 completed, 1 failed\\), 2 at once")
  expect_match(shown[[3L]], "^ +1 +4 +0\\.1 ")
  expect_error(best(trials, 2), "Trial 2 has no model", class = "tfdist_error_input")
  expect_error(best(trials[1, c("trial", "loss")]), "do not exist any more")
})

test_full("workers build the models of trials, and poor ones end early", {
  skip_if_no_pybackend()
  skip_if_not(reticulate::py_module_available("rpy2"))
  trials <- train_many(
    "local",
    model_fn = build,
    data = iris_arrays(),
    grid = data.frame(rate = c(0.1, 0)),
    parallelism = 1,
    prune = list("halving", factor = 2),
    epochs = 4,
    seed = 3,
    verbose = 0
  )
  expect_identical(trials$status, c("completed", "pruned"))
  expect_identical(trials$trained_epochs, c(4L, 1L))
  expect_identical(best(trials)$epochs, 4L)
})
