test_that("wrong arguments are errors before anything is started", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    barrier_apply(4, function(ctx) 1)
    barrier_apply("local", "f")
    barrier_apply("local", sum)
    barrier_apply("local", function() 1)
    barrier_apply("local", function(ctx) 1, workers = 0)
    barrier_apply("local", function(ctx) 1, packages = 3)
    barrier_apply("local", function(ctx) 1, roles = 3)
    barrier_apply("local", function(ctx) 1, roles = c(chief = 0.5))
    barrier_apply("local", function(ctx) 1, verbose = 3)
    barrier_apply("local", function(ctx) 1, data = 1:3)
    barrier_apply("local", function(ctx) 1, data = list(1:3))
    barrier_apply("local", function(ctx) 1, data = list(x = 1:3, y = 1:2))
    barrier_apply("local", function(ctx) 1, data = list(x = c(1, NA)))
    barrier_apply("local", function(ctx) 1, data = iris)
    barrier_apply("local", function(ctx) 1, data = mtcars[0, ])
    barrier_apply("local", function(ctx) 1, data = structure(list(), class = "tbl_spark"))
  })
})

test_that("a function runs once per worker, with its context and TF_CONFIG", {
  skip_if_no_pybackend()
  offset <- 0.5
  rows <- list(
    x = array(seq_len(5 * 2 * 3) / 7, c(5, 2, 3)),
    n = c(-1L, 0L, 1L, 2L, 3L),
    is = c(TRUE, FALSE, TRUE, TRUE, FALSE),
    byte = as.raw(251:255)
  )
  found <- barrier_apply(
    "local",
    function(ctx, scale) {
      feed <- ctx$feed(2)
      batches <- list()
      while (!is.null(batch <- feed())) {
        batches <- c(batches, list(batch))
      }
      list(
        batches = batches,
        ended = is.null(feed()),
        rank = ctx$rank + offset,
        table = data.frame(a = ctx$world_size * scale, b = I("x")),
        same = identical(Sys.getenv("TF_CONFIG"), ctx$tf_config),
        addresses = ctx$addresses,
        attached = "package:splines" %in% search()
      )
    },
    workers = 2,
    data = rows,
    scale = 10L,
    packages = "splines",
    verbose = 0
  )
  expect_identical(lapply(found, `[[`, "rank"), list(0.5, 1.5))
  expect_identical(found[[1]]$table, data.frame(a = 20L, b = I("x")))
  expect_true(found[[2]]$same && found[[2]]$attached)
  expect_identical(found[[1]]$addresses, found[[2]]$addresses)
  expect_length(found[[1]]$addresses, 2)

  # Rows are assigned in turn, with the types of the columns.
  taken <- function(at) {
    list(x = rows$x[at, , , drop = FALSE], n = rows$n[at], is = rows$is[at], byte = 250L + at)
  }
  expect_identical(found[[1]]$batches, list(taken(c(1L, 3L)), taken(5L)))
  expect_identical(found[[2]]$batches, list(taken(c(2L, 4L))))
  expect_true(found[[1]]$ended)
})

test_full("workers have roles and share values, and servers end", {
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

test_that("columns of a data frame keep their types", {
  skip_if_no_pybackend()
  rows <- data.frame(x = c(0.1, 0.2), n = 1:2, is = c(TRUE, FALSE))
  columns <- check_apply_data(rows, check_sc("local"))$value
  type_of <- function(x) reticulate::py_to_r(as_column_array(x)$dtype$name)
  types <- vapply(columns, type_of, "")
  expect_identical(types, c(x = "float64", n = "int32", is = "bool"))
})

test_full("an error arrives with its rank, message and calls", {
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
