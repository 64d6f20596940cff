test_that("the options of a call are checked by their names, with the words of R", {
  skip_if_no_pybackend()
  call <- function(
    workers = 2,
    seed = NULL,
    verbose = TRUE,
    shuffle = TRUE,
    validation_freq = 1,
    timeout = 300,
    exchange = NULL,
    resources = NULL,
    recovery = NULL,
    class_weight = NULL
  ) {
    check_arguments(names(formals()))
  }
  expect_identical(call()[1:3], list(workers = 2, seed = NULL, verbose = TRUE))
  expect_no_error(call(verbose = 2L, shuffle = "global", validation_freq = c(1, 5)))
  expect_no_error(call(recovery = "run", class_weight = table(c(0, 0, 1))))
  expect_snapshot(error = TRUE, {
    call(workers = "two")
    call(workers = c(1, 2))
    call(workers = elastic(2))
    call(seed = -1)
    call(shuffle = NA)
    call(shuffle = "rows")
    call(verbose = "loud")
    call(validation_freq = 0)
    call(validation_freq = "all")
    call(timeout = 0)
    call(exchange = resources())
    call(resources = list(cpus = 2))
    call(recovery = 3)
    call(class_weight = c(1, 5))
    call(class_weight = "balanced")
    call(class_weight = list("0" = 1:2))
    call(class_weight = c("0" = 1, 2))
    call(class_weight = c("0" = -1))
    call(class_weight = c("0" = 1, "1" = NA))
    call(class_weight = c("0" = 1, "1" = Inf))
    call(class_weight = c("0" = 1, "0" = 2))
  })
})

test_that("callbacks and custom objects must come from Python", {
  expect_null(check_callbacks(NULL))
  expect_null(check_callbacks(list()))
  expect_snapshot(error = TRUE, {
    check_callbacks(list(mean), arg = "callbacks")
    check_callbacks("early", arg = "callbacks")
    check_custom_objects(list(1), arg = "custom_objects")
  })
})

# Calls that fail before anything is started, with their whole-number arguments.
build <- function() stop("the model is built")
of_training <- c("workers", "epochs", "batch_size", "seed", "verbose")
of_scoring <- c("workers", "batch_size", "verbose")
of_barrier_train <- c(
  of_training,
  c("initial_epoch", "steps_per_epoch", "validation_freq")
)
counted_calls <- list(
  barrier_train = list(quote(barrier_train("local", build, iris, Species ~ .)), of_barrier_train),
  plan = list(quote(plan("local", build, iris, Species ~ .)), of_barrier_train),
  train_mnist = list(quote(train_mnist("local")), c(of_training, "limit")),
  barrier_evaluate = list(quote(barrier_evaluate("local", build, list(1:3, 1:3))), of_scoring),
  barrier_predict = list(quote(barrier_predict("local", build, as.matrix(iris[1:4]))), of_scoring),
  barrier_apply = list(quote(barrier_apply("local", function(ctx) 1)), c("workers", "verbose")),
  bench_scale = list(quote(bench_scale(function(...) 1)), c("workers", "steps", "repeats")),
  recovery = list(quote(recovery("folder")), c("every", "keep", "restarts")),
  elastic = list(quote(elastic()), c("workers", "min", "max")),
  parameter_server = list(quote(parameter_server()), "servers"),
  local_steps = list(quote(local_steps()), "steps"),
  kubernetes = list(quote(kubernetes("image")), c("gpus", "ttl", "time_limit")),
  resources = list(quote(resources()), c("cpus", "gpus")),
  slurm = list(quote(slurm("part")), c("nodes", "gpus", "cpus")),
  make_tf_config = list(quote(make_tf_config(c("a:1", "b:1"), 0)), "index"),
  join_workers = list(quote(join_workers(c("a:1", "b:1"))), "index"),
  mnist = list(quote(mnist()), "limit"),
  undeploy_model = list(quote(undeploy_model(NULL, "name")), "version")
)

# Python checks these when the object is made.
options <- c("recovery", "elastic", "parameter_server", "local_steps")
options <- c(options, "kubernetes", "resources", "slurm")

for (name in names(counted_calls)) {
  test_that(sprintf("whole numbers of %s() are doubles or integers, and nothing else", name), {
    skip_if_no_pybackend()
    for (arg in counted_calls[[name]][[2L]]) {
      call_with <- function(value) {
        call <- as.list(counted_calls[[name]][[1L]])
        call[[arg]] <- value
        suppressMessages(eval(as.call(call)))
      }
      for (bad in list(1.5, NA, -1, NaN, factor(3), "two")) {
        expect_error(call_with(bad), sprintf("`%s`", arg), class = "tfdist_error_input")
      }
    }
  })
}

test_that("the numbers of elastic() fit each other", {
  skip_if_no_pybackend()
  expect_error(elastic(2, min = 3), class = "tfdist_error_input")
  expect_error(elastic(2, max = 1), class = "tfdist_error_input")
  expect_error(elastic(min = 3, max = 2), class = "tfdist_error_input")
  expect_no_error(elastic(2, min = 2, max = 2))
})

test_full("a whole number may be a double or an integer", {
  for (arg in setdiff(of_barrier_train, "initial_epoch")) {
    for (value in list(2, 2L)) {
      call <- as.list(quote(barrier_train("local", build, iris, Species ~ ., verbose = 0)))
      call[[arg]] <- value
      suppressMessages(expect_error(eval(as.call(call)), "the model is built"))
    }
  }
})

test_that("options print their fields", {
  expect_snapshot({
    exchange(compression = "bf16", bucket_mb = Inf)
    local_steps(100, learning_rate = 0.7, momentum = 0.9)
    data_options(categories = list(color = c("blue", "red")))
  })
})

test_that("options have the same names and defaults in R and Python", {
  skip_if_no_pybackend()
  expect_same_arguments("exchange", "Exchange")
  expect_same_arguments("local_steps", "LocalSteps")
  expect_same_arguments("data_options", "DataOptions")
  expect_same_arguments("model_options", "ModelOptions")
})

test_that("options become Python's objects", {
  skip_if_no_pybackend()
  expect_null(as_python_options(NULL))
  python <- as_python_options(local_steps(8, momentum = 0.9, compression = "fp16"))
  expect_s3_class(python, "pybackend.core.job.worker_options.LocalSteps")
  expect_identical(python$steps, 8L)
  expect_identical(python$momentum, 0.9)
  expect_identical(as_python_options(exchange(bucket_mb = Inf))$bucket_mb, Inf)
  options <- data_options(tensors = list(words = list("int32", NA)), repartition = FALSE)
  expect_identical(as_python_options(options)$repartition, FALSE)
})

test_that("values that would mean something else in Python are errors", {
  skip_if_no_pybackend()
  call <- function(workers = 2, seed = NULL, recovery = NULL, resources = NULL) {
    check_arguments(names(formals()))
  }
  rows <- list(c(0, 1))
  train <- function(...) barrier_train("local", function() NULL, rows, label = NULL, ...)
  expect_snapshot(error = TRUE, {
    call(workers = numeric())
    call(seed = integer())
    call(recovery = character())
    call(recovery = recovery)
    call(workers = elastic)
    recovery("run", every = as.difftime(5, units = "mins"))
    recovery(character())
    exchange(scale_lr = NA)
    exchange(scale_lr = list("sqrt", warmup_epochs = NA))
    exchange(scale_lr = list("sqrt", warmup = 5))
    exchange(scale_lr = list("sqrt", decay = c("3" = 0.1, "3" = 0.2)))
    train(validation_split = numeric())
    train(recovery = recovery)
    plan("local", function() NULL, rows, label = NULL, submit = NA)
    submit_training("local", function() NULL, rows, label = NULL, folder = NA)
    train_many("local", function(a) NULL, rows, label = NULL, grid = list(a = 1), prune = NA)
    train_many(
      "local",
      function(a) NULL,
      rows,
      label = NULL,
      grid = list(a = 1),
      prune = list("halving", fctor = 2)
    )
  })
  expect_no_error(exchange(scale_lr = list("sqrt", warmup_epochs = 5)))
})
