test_that("shapes and values are sent in Python's form", {
  options <- data_options(
    tensors = list(
      image = list("uint8", c(28, 28)),
      words = list("int32", NA),
      tracks = list("float32", c(NA, 3))
    ),
    categories = list(color = factor(c("red", "blue")), size = c(1, 5), kind = "one"),
    tfrecord_spec = c(a = "float32", words = "int64[]")
  )
  fields <- lapply(as_python_data_options(unclass(options)), as_python_setting)
  expect_identical(
    fields$tensors,
    list(
      image = list("uint8", list(28, 28)),
      words = list("int32", list(NULL)),
      tracks = list("float32", list(NULL, 3))
    )
  )
  expect_identical(
    fields$categories,
    list(color = list("red", "blue"), size = list(1L, 5L), kind = list("one"))
  )
  expect_identical(fields$tfrecord_spec, list(a = "float32", words = "int64[]"))
  expect_true(fields$repartition)
  none <- as_python_data_options(unclass(data_options()))
  expect_null(as_python_setting(none$tensors))
})

test_that("bad data options are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    data_options(tensors = c(image = "uint8"))
    data_options(tensors = list(image = "uint8"))
    data_options(tensors = list(image = list("pixel", 28)))
    data_options(tensors = list(image = list("uint8", c(28, 0))))
    data_options(tensors = list(image = list("uint8", c(28, NA))))
    data_options(categories = c("red", "blue"))
    data_options(categories = list(color = c("red", "red")))
    data_options(categories = list(color = character()))
    data_options(tfrecord_spec = "int64")
    data_options(tfrecord_spec = c(a = "double"))
    data_options(repartition = "no")
    data_options(in_memory = NA)
  })
  expect_error(data_options(in_memory = 1), class = "tfdist_error_input")
})

test_that("bad ways to exchange are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    exchange(transport = "udp")
    exchange(compression = "zip")
    exchange(transport = "tf", compression = "fp16")
    exchange(bucket_mb = 0)
    exchange(loss_over = "batch")
    exchange(encrypt = "yes")
    exchange(transport = "tf", encrypt = TRUE)
    exchange(audit = "no")
    exchange(shard_optimizer = NA)
    exchange(shard_optimizer = TRUE, compression = "fp16")
    local_steps(1)
    local_steps(10, learning_rate = Inf)
    local_steps(10, momentum = 1)
    local_steps(10, compression = "zip")
    local_steps(10, encrypt = NA)
  })
  expect_true(exchange(shard_optimizer = TRUE)$shard_optimizer)
  expect_error(exchange(bucket_mb = "all"), class = "tfdist_error_input")
  expect_error(local_steps(0), class = "tfdist_error_input")
})

test_that("a rule for the learning rate is a name, or a list of one and its settings", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    exchange(scale_lr = "cubic")
    exchange(scale_lr = exchange())
    exchange(scale_lr = list("cubic"))
    exchange(scale_lr = list("sqrt", warmup_epochs = -1))
    exchange(scale_lr = list(decay = 0.1))
    exchange(scale_lr = list(decay = c("1.5" = 0.1)))
    exchange(scale_lr = list(decay = c("2" = 0)))
    barrier_train("local", dense_model, iris, scale_lr = "linear")
  })
})

test_full("the learning rate follows the workers", {
  skip_if_no_pybackend()
  scaled <- exchange(scale_lr = list("sqrt", decay = c("1" = 0.5)))
  python <- as_python_options(scaled)$scale_lr
  expect_identical(python$multiple(4L, 0), 2)
  expect_identical(python$multiple(4L, 1), 1)
  fit <- barrier_train(
    "local",
    dense_model(),
    iris_arrays(),
    workers = 2,
    epochs = 2,
    exchange = scaled,
    seed = 1,
    verbose = 0
  )
  rate <- as.numeric(fit$model$optimizer$learning_rate$numpy())
  expect_equal(unlist(fit$history$learning_rate), rate * sqrt(2) * c(1, 0.5), tolerance = 1e-6)
})

test_that("checkpoints and restarts are checked when they are named", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    recovery(1)
    recovery("run", every = "weekly")
    recovery("run", keep = 0)
    barrier_train("local", function() 1, iris, label = "Species", recovery = 3)
    recovery("run", resume = "yes")
    recovery(resume = TRUE)
    barrier_train("local", function() 1, iris, label = "Species", resume = TRUE)
    barrier_train("local", function() 1, iris, label = "Species", checkpoint = "run")
    barrier_train("local", function() 1, iris, label = "Species", restarts = 1)
  })
  expect_error(recovery("run", every = 0), class = "tfdist_error_input")
})

test_that("checkpoints show what they are, and have Python's defaults", {
  expect_snapshot(recovery("/shared/run", every = "10min"))
  skip_if_no_pybackend()
  expect_same_arguments("recovery", "Recovery")
})

test_full("a training goes on from its checkpoint", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  fit <- train_flowers(iris_arrays(), epochs = 1, recovery = folder)
  more <- train_flowers(iris_arrays(), epochs = 2, recovery = recovery(folder, resume = TRUE))
  expect_identical(more$history$loss[[1L]], fit$history$loss[[1L]])
  kept <- load_checkpoint(folder)
  expect_identical(kept$get_weights(), more$model$get_weights())
})

test_full("elastic training resumes from its checkpoint", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  train <- function(...) {
    settings <- list(workers = elastic(1), seed = 1, verbose = 0, ...)
    do.call(barrier_train, c(list("local", dense_model(), iris_arrays()), settings))
  }
  fit <- train(epochs = 1, recovery = folder)
  more <- train(epochs = 2, recovery = recovery(folder, resume = TRUE))
  expect_identical(more$history$loss[[1L]], fit$history$loss[[1L]])
  expect_identical(more$generations$epoch, c(1L, 2L))
  expect_identical(more$generations$joined, c("", "0"))
})

test_that("resources are checked when they are named", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    resources(cpus = 0)
    resources(memory = "lots")
    resources(memory = 0)
    resources(gpus = -1)
    train_mnist("local", resources = list(cpus = 2))
    barrier_apply("local", function(ctx) 1, resources = 2)
  })
  expect_error(resources(memory = NA), class = "tfdist_error_input")
  expect_error(resources(fork_server = "yes"), "`fork_server` must be ")
})

test_that("resources show what they are", {
  expect_snapshot(resources(cpus = 2, memory = "4GB"))
})

test_that("an environment is a path, or that of this session", {
  skip_if_no_pybackend()
  expect_no_error(resources(environment = "this"))
  expect_error(resources(environment = 3), "`environment` must be \"this\" or a path")
  wanted <- resources(environment = "nowhere")
  expect_error(
    barrier_apply("local", function(ctx) 1, workers = 1, resources = wanted),
    "`environment` must be \"this\".*does not exist",
    class = "tfdist_error_input"
  )
  expect_error(pack_environment("env.zip"), "must end with .tar.gz", class = "tfdist_error_input")
})

test_full("an environment is packed", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  made <- file.path(folder, "made")
  python <- reticulate::import("sys")$executable
  expect_identical(system2(python, c("-m", "venv", "--without-pip", made)), 0L)
  file <- file.path(folder, "env.tar.gz")
  expect_message(pack_environment(file, made), "Python 3.* and 0 packages")
  expect_true(file.exists(file))
})

test_full("workers have the resources of the call", {
  skip_if_no_pybackend()
  threads <- function(ctx) c(Sys.getenv("OMP_NUM_THREADS"), Sys.getenv("CUDA_VISIBLE_DEVICES", NA))
  wanted <- resources(cpus = 1, memory = "4GiB", gpus = 0)
  found <- barrier_apply("local", threads, workers = 1, resources = wanted, verbose = 0)
  expect_identical(found, list(c("1", "")))
  expect_error(
    barrier_apply("local", threads, workers = 1, resources = resources(cpus = 9999)),
    "A worker needs 9999 cpus, but this machine has",
    class = "tfdist_error_input"
  )
})
