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
