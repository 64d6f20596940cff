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
})

test_that("resources show what they are", {
  expect_snapshot(resources(cpus = 2, memory = "4GB"))
})

test_full("workers have the resources of the call", {
  skip_if_no_pybackend()
  threads <- function(ctx) c(Sys.getenv("OMP_NUM_THREADS"), Sys.getenv("CUDA_VISIBLE_DEVICES", NA))
  wanted <- resources(cpus = 1, memory = "4GiB", gpus = 0)
  found <- barrier_apply("local", threads, workers = 1, resources = wanted, verbose = 0)
  expect_identical(found, list(c("1", "")))
  expect_error(
    barrier_apply("local", threads, workers = 1, resources = resources(cpus = 9999)),
    "a worker needs 9999 cpus, but this machine has",
    class = "tfdist_error_input"
  )
})
