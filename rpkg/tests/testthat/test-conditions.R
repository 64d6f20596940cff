envelope <- list(
  class = "WorkerFailedError",
  message = "worker 1 on node failed: ValueError: bad {value}",
  rank = 1L,
  host = "node",
  exception_type = "ValueError",
  traceback = "Traceback (most recent call last):\n  ...\nValueError: bad {value}",
  log = list("line 1", "line 2"),
  timeline = list(list(time = 1.5e9, state = "started", reason = "PID 7", rank = 1L, host = "node"))
)

test_that("a worker's failure is a condition with all its fields", {
  condition <- tryCatch(abort_python(envelope), tfdist_error = identity)
  expect_s3_class(condition, c("tfdist_error_worker_failed", "tfdist_error"))
  expect_identical(condition$rank, 1L)
  expect_identical(condition$host, "node")
  expect_identical(condition$exception_type, "ValueError")
  expect_match(condition$traceback, "^Traceback")
  expect_identical(condition$log, c("line 1", "line 2"))
  moment <- data.frame(rank = 1L, host = "node", time = .POSIXct(1.5e9), state = "started")
  expect_identical(condition$timeline, cbind(moment, reason = "PID 7"))
  expect_match(conditionMessage(condition), "bad {value}", fixed = TRUE)
})

test_that("each Python exception has its condition class", {
  for (name in names(condition_classes)) {
    error <- utils::modifyList(envelope, list(class = name))
    expect_error(abort_python(error), class = condition_classes[[name]])
  }
})

test_that("an unexpected Python error shows its class and traceback", {
  error <- utils::modifyList(envelope, list(class = "TypeError", message = "no such thing"))
  expect_snapshot(error = TRUE, abort_python(error))
  expect_error(abort_python(error), class = "tfdist_error_python")
})

test_that("a failure without rank or log is complete as well", {
  error <- list(class = "InputError", message = "no", log = list())
  condition <- tryCatch(abort_python(error), tfdist_error = identity)
  expect_null(condition$rank)
  expect_identical(condition$log, character())
  expect_null(condition$timeline)
})

test_that("the backtrace ends at the call that the user made", {
  ask <- function() train_mnist("local", workers = 0)
  trace <- tryCatch(ask(), tfdist_error = function(error) format(error$trace, simplify = "none"))
  expect_match(utils::tail(trace, 1), "train_mnist(", fixed = TRUE)
  expect_match(utils::tail(trace, 2)[[1]], "ask()", fixed = TRUE)
})

test_that("errors of Python show values, settings and names as R's code", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    call_python(pybackend()$Resources, memory = "much")
    call_python(pybackend()$LocalSteps, 0)
    call_python(pybackend()$kubernetes, NULL)
    call_python(pybackend()$hosts, list(a = 1))
  })
})

test_that("so do the errors of real calls", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  train <- function(..., data = iris, model = dense_model(), workers = 2, label = "Species") {
    barrier_train("local", model, data, ..., label = label, workers = workers, verbose = 0)
  }
  one_hot <- model.matrix(~ Species - 1, iris)
  trials <- function(...) stop("no units")
  expect_snapshot(error = TRUE, transform = function(x) gsub(folder, "FOLDER", x, fixed = TRUE), {
    train(workers = 2000)
    train(workers = elastic(4, min = 6))
    train(workers = elastic(2), exchange = local_steps(4))
    train(exchange = exchange(shard_optimizer = TRUE, compression = "fp16"))
    train(exchange = exchange(scale_lr = list("linear", decay = c("30" = -1))))
    train(validation_freq = 2)
    train(shuffle = "global", data = list(as.matrix(iris[1:4]), iris$Species), epochs = 0)
    train(data = list(as.matrix(iris[1:4]), one_hot), label = NULL)
    train(data = as.matrix(iris[1:4]), label = NULL)
    train(data = iris[1:3], label = NULL)
    train(resources = resources(memory = "4 parrots"))
    train(recovery = recovery(folder, every = "weekly"))
    train(model_options = model_options(file.path(folder, "model.pkl")))
    bench_scale(function(workers, batch_size) 3, workers = 1:2)
    make_tf_config(worker = c("a:1", "a:1"))
    make_tf_config(worker = "a")
    read_fit(folder)
    load_checkpoint(file.path(folder, "none"))
    train_many("local", trials, iris, Species ~ ., grid = list(units = 1:2), verbose = 0)
  })
})

test_that("so do the errors of workers", {
  skip_if_no_pybackend()
  fail <- reticulate::py_run_string(
    "
def fail(context):
    from pybackend import LocalSteps
    if context.rank == 0:
        LocalSteps('None')
    raise ValueError('None is not workers=2')
",
    local = TRUE
  )$fail
  error <- expect_error(
    call_python(pybackend()$barrier_run, "local", fail, workers = 1L, verbose = 0L),
    class = "tfdist_error_worker_failed"
  )
  first <- strsplit(conditionMessage(error), "\n")[[1]][[1]]
  expect_match(first, "failed: `steps` must be a whole number, not \"None\"", fixed = TRUE)
})

test_that("messages of Python become whole sentences", {
  lost <- "worker 1 on node failed: ValueError: bad row\n\nTraceback of worker 1:\n  f(x)\n\n"
  sentences <- c(
    "the cluster has neither workers nor a chief: list the workers" = "The",
    "there is no file absent.json" = "There",
    "plots need matplotlib: run `install_tfdist()`" = "Plots",
    "a worker's result is damaged: x" = "A",
    "worker, not chief" = "Worker,",
    "`steps` must be at least 2, not 0" = "`steps`",
    "\"b:two\" is not a host" = "\"b:two\"",
    "workers = 2 asks for two slots" = "workers",
    "type = \"prob\" needs probabilities" = "type",
    "worker[0] = 8080 is not text: expected \"host:port\"" = "worker[0]",
    "s3://models/a is empty" = "s3://models/a",
    "/tmp/a.h5 is empty" = "/tmp/a.h5",
    "spark.ssl.enabled is true" = "spark.ssl.enabled",
    "package() needs a single-column `key`" = "package()",
    "sparklyr's connection is closed" = "sparklyr's",
    "srun cannot be started" = "srun",
    "Keras cannot read it (damaged)" = "Keras"
  )
  made <- vapply(names(sentences), as_sentences, "", USE.NAMES = FALSE)
  expect_identical(sub(" .*", "", made), unname(sentences))
  expect_match(made, "[^.][.]$")
  expect_identical(sub("^.", "", made), sub("^.", "", paste0(names(sentences), ".")))

  expect_identical(as_sentences("Is it there?"), "Is it there?")
  expect_identical(as_sentences("see https://keras.io/api"), "See https://keras.io/api")
  expect_identical(as_sentences(""), "")
  expect_identical(as_sentences("\n\nWhat to do: wait"), "\n\nWhat to do: wait.")
  expect_identical(
    as_sentences(paste0(lost, "What to do: fix it, then start again")),
    sub("bad row", "bad row.", sub("w", "W", paste0(lost, "What to do: fix it, then start again.")))
  )
  expect_identical(as_sentences("arguments:\n  x: float32"), "Arguments:\n  x: float32")
})

test_that("errors of Python reach users in R's voice", {
  skip_if_no_pybackend()
  error <- expect_error(attach_job("abc"), class = "tfdist_error_input")
  expect_match(conditionMessage(error), "^There is no job .*[.]$")
})
