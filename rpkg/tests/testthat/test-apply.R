test_that("wrong arguments are errors before anything is started", {
  expect_snapshot(error = TRUE, {
    barrier_apply(4, function(ctx) 1)
    barrier_apply("local", "f")
    barrier_apply("local", sum)
    barrier_apply("local", function() 1)
    barrier_apply("local", function(ctx) 1, workers = 0)
    barrier_apply("local", function(ctx) 1, packages = 3)
    barrier_apply("local", function(ctx) 1, roles = 3)
    barrier_apply("local", function(ctx) 1, roles = c(chief = 0.5))
    barrier_apply("local", function(ctx) 1, roles = list(master = 1, worker = 2))
    barrier_apply("local", function(ctx) 1, verbose = 3)
  })
})

test_that("a function runs once per worker, with its context and TF_CONFIG", {
  skip_if_no_pybackend()
  offset <- 0.5
  found <- barrier_apply(
    "local",
    function(ctx, scale) {
      list(
        rank = ctx$rank + offset,
        table = data.frame(a = ctx$world_size * scale, b = I("x")),
        same = identical(Sys.getenv("TF_CONFIG"), ctx$tf_config),
        addresses = ctx$addresses,
        attached = "package:splines" %in% search()
      )
    },
    workers = 2,
    scale = 10L,
    packages = "splines",
    verbose = 0
  )
  expect_identical(lapply(found, `[[`, "rank"), list(0.5, 1.5))
  expect_identical(found[[1]]$table, data.frame(a = 20L, b = I("x")))
  expect_true(found[[2]]$same && found[[2]]$attached)
  expect_identical(found[[1]]$addresses, found[[2]]$addresses)
  expect_length(found[[1]]$addresses, 2)
})

test_that("workers have roles and share values, and servers end", {
  skip_if_no_pybackend()
  found <- barrier_apply(
    "local",
    function(ctx) {
      shared <- ctx$all_gather(ctx$role)
      ctx$barrier()
      if (ctx$role == "ps") {
        Sys.sleep(1000)
      }
      list(ctx$role, ctx$index, unlist(shared))
    },
    roles = c(worker = 1, ps = 1),
    verbose = 0
  )
  expect_identical(found, list(list("worker", 0L, c("worker", "ps")), NULL))
})

test_that("an error arrives with its rank, message and calls", {
  skip_if_no_pybackend()
  expect_worker_error("local")
})

test_that("model and model_fn cannot be used together, and model_fn is a function", {
  model_fn <- function() NULL
  expect_snapshot(error = TRUE, {
    barrier_train("local", model_fn, iris, model_fn = model_fn)
    barrier_train("local", data = iris)
    barrier_train("local", data = iris, model_fn = "keras")
    barrier_train("local", data = iris, model_fn = function(units) NULL)
  })
})
