# Functions of R on the executors of a real sparklyr connection.
sc <- file_connection(full_cluster())

views <- function() {
  session <- open_session(check_sc(sc))
  vapply(session$catalog$listTables(), function(view) view$name, "")
}

test_full("an error on a worker has its rank, message and calls", {
  before <- views()
  expect_worker_error(sc)
  expect_setequal(views(), before)
})

# After the error, to check that the connection still works.
test_full("f runs once per worker in R, and large results arrive whole", {
  shift <- 7
  found <- barrier_apply(
    sc,
    function(ctx, size) {
      bytes <- raw(if (ctx$rank == 0) size else 1)
      list(rank = ctx$rank + shift, config = Sys.getenv("TF_CONFIG"), bytes = bytes)
    },
    workers = 2,
    size = 5e7,
    verbose = 0
  )
  expect_identical(lapply(found, `[[`, "rank"), list(7, 8))
  expect_identical(lengths(lapply(found, `[[`, "bytes")), c(5e7L, 1L))
  configs <- lapply(found, function(value) jsonlite::fromJSON(value$config))
  expect_identical(configs[[1]]$cluster$worker, configs[[2]]$cluster$worker)
  expect_identical(configs[[2]]$task$index, 1L)
})

test_that("more workers than slots are rejected", {
  expect_error(
    barrier_apply(sc, function(ctx) 1, workers = 5),
    "at most 2 tasks",
    class = "tfdist_error_cluster"
  )
})

test_full("a table trains with a model built by R", {
  rows <- stats::setNames(iris, c("a", "b", "c", "d", "label"))
  rows$label <- as.integer(rows$label) - 1L
  table <- sparklyr::sdf_copy_to(sc, rows, "iris_for_r", overwrite = TRUE)
  units <- 3L
  model_fn <- function() {
    keras <- reticulate::import("keras")
    model <- keras$Sequential(list(
      keras$Input(reticulate::tuple(4L)),
      keras$layers$Dense(units)
    ))
    # A loss that is an R function.
    loss <- function(y_true, y_pred) {
      keras$losses$sparse_categorical_crossentropy(y_true, y_pred, from_logits = TRUE)
    }
    model$compile(optimizer = "sgd", loss = loss)
    model
  }
  fit <- barrier_train(sc, model_fn = model_fn, data = table, workers = 2, verbose = 0, seed = 1)
  expect_identical(sum(fit$workers$rows), 150L)
  expect_true(all(fit$workers$ok))

  # Functions can read the rows of a table, too.
  found <- barrier_apply(
    sc,
    function(ctx) {
      feed <- ctx$feed(64)
      sums <- 0
      while (!is.null(batch <- feed())) {
        sums <- sums + c(length(batch$label), sum(batch$a), sum(nchar(batch$kind)))
      }
      sums
    },
    workers = 2,
    data = dplyr::mutate(table, kind = "text"),
    verbose = 0
  )
  expect_equal(Reduce(`+`, found), c(150, sum(rows$a), 600))
})

test_full("an R function returns the batches of each worker, whoever builds the model", {
  batches <- function(ctx) {
    tf <- reticulate::import("tensorflow")
    rows <- seq(ctx$rank + 1L, 150L, by = ctx$world_size)
    tf$data$Dataset$from_tensor_slices(reticulate::tuple(
      tf$constant(as.matrix(iris[rows, 1:4]), dtype = "float32"),
      tf$constant(as.integer(iris$Species)[rows] - 1L)
    ))$batch(25L)
  }
  train <- function(sc, ...) {
    barrier_train(sc, dense_model(), batches, workers = 2, seed = 1, verbose = 0, ...)
  }
  fit <- train(sc)
  expect_identical(sum(fit$workers$rows), 150L)
  expect_equal(fit_weights(fit), fit_weights(train("local")), tolerance = 1e-6)
})

test_full("an executor without Python says so", {
  withr::local_envvar(PYSPARK_PYTHON = "/nonexistent/python")
  expect_error(
    barrier_apply(sc, function(ctx) 1, workers = 2),
    "here is no Python at /nonexistent/python",
    class = "tfdist_error_cluster"
  )
})

# Interrupt workers that sleep; expect that they exit and that the next call works.
expect_interrupted <- function(place) {
  marker <- withr::local_tempfile()
  # A second process interrupts this one when a worker has started.
  program <- sprintf(
    "while [ ! -e %s ]; do sleep 0.2; done; kill -INT %d",
    shQuote(marker),
    Sys.getpid()
  )
  system2("sh", c("-c", shQuote(program)), wait = FALSE)
  outcome <- suppressMessages(tryCatch(
    barrier_apply(
      place,
      function(ctx) {
        # Written by renaming, so that an existing marker is complete.
        if (ctx$rank == 0) {
          writeLines(as.character(Sys.getpid()), paste0(marker, "-new"))
          file.rename(paste0(marker, "-new"), marker)
        }
        Sys.sleep(300)
      },
      workers = 2,
      verbose = 0
    ),
    interrupt = function(condition) "interrupted"
  ))
  expect_identical(outcome, "interrupted")
  worker <- as.integer(readLines(marker))
  deadline <- Sys.time() + 60
  while (is_running(worker) && Sys.time() < deadline) {
    Sys.sleep(0.1)
  }
  expect_false(is_running(worker))
  again <- barrier_apply(place, function(ctx) ctx$rank, workers = 2, verbose = 0)
  expect_identical(again, list(0L, 1L))
}

test_full("Ctrl-C ends the workers, and the connection survives", {
  expect_interrupted(sc)
})

test_full("Ctrl-C ends R inside the Python of PySpark's barrier, too", {
  expect_interrupted(open_session(check_sc(sc)))
})
