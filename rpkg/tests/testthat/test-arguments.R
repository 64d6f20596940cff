test_that("the arguments of a call are checked by their names", {
  call <- function(workers = 2, seed = NULL, verbose = TRUE) {
    check_arguments(c("workers", "seed", "verbose"))
  }
  expect_identical(call(), list(workers = 2L, seed = NULL, verbose = 1L))
  expect_snapshot(error = TRUE, {
    call(workers = "two")
    call(seed = -1)
  })
})

test_that("shuffling, verbosity and validation epochs say what they expect", {
  expect_snapshot(error = TRUE, {
    check_shuffle(NA, arg = "shuffle")
    check_shuffle("rows", arg = "shuffle")
    check_verbose("loud", arg = "verbose")
    check_validation_freq(0, arg = "validation_freq")
    check_validation_freq("all", arg = "validation_freq")
  })
  expect_identical(check_shuffle("global"), "global")
  expect_identical(check_verbose(TRUE), 1L)
  expect_identical(check_validation_freq(2), 2L)
  expect_identical(check_validation_freq(c(1, 5)), list(1L, 5L))
  expect_identical(check_validation_freq(list(1L, 5L)), list(1L, 5L))
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
of_training <- c("workers", "epochs", "batch_size", "seed", "restarts", "verbose")
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
  checkpoint = list(quote(checkpoint("folder")), c("every", "keep")),
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

# Python checks these, without a maximum.
options <- c("checkpoint", "elastic", "parameter_server", "local_steps")
options <- c(options, "kubernetes", "resources", "slurm")

for (name in names(counted_calls)) {
  test_that(sprintf("whole numbers of %s() are doubles or integers, and nothing else", name), {
    if (name %in% options) {
      skip_if_no_pybackend()
    }
    for (arg in counted_calls[[name]][[2L]]) {
      call_with <- function(value) {
        call <- as.list(counted_calls[[name]][[1L]])
        call[[arg]] <- value
        suppressMessages(eval(as.call(call)))
      }
      texts <- if (!arg %in% c("verbose", "index")) "1"
      huge <- if (!name %in% c("bench_scale", options)) 1e10
      for (bad in c(list(1.5, NA, -1, NaN, factor(3)), huge, texts)) {
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
