step_event <- function(...) {
  event <- list(epoch = 1L, epochs = 2L, step = 5L, steps = 20L, rows = 160L, seconds = 0.5)
  utils::modifyList(c(event, list(loss = 0.75)), list(...))
}

test_that("without a live console progress is lines", {
  progress <- new_progress()
  expect_false(progress("is_live"))
  expect_output(progress("begin", list(text = "Starting")), "^Starting$")
  expect_output(progress("epoch", list(text = "epoch {1}/2")), "epoch {1}/2", fixed = TRUE)
  expect_silent(progress("end"))
})

test_that("suppressMessages() hides progress", {
  progress <- new_progress()
  expect_silent(suppressMessages(progress("epoch", list(text = "epoch 1/2"))))
  local_mocked_bindings(is_dynamic_tty = function() TRUE, .package = "cli")
  withr::local_options(rlang_interactive = TRUE, knitr.in.progress = FALSE)
  expect_true(progress("is_live"))
  expect_false(suppressMessages(progress("is_live")))
})

test_that("speed and the time left follow from the last reports of an epoch", {
  now <- rlang::env(recent = list())
  expect_null(describe_speed(now, step_event()))
  later <- step_event(step = 15L, rows = 480L, seconds = 1.5)
  expect_identical(describe_speed(now, later), c("320 rows/s", "ETA 2 s"))
  shown <- vapply(c(4.4, 65, 705, 7200, 7500), format_seconds, "")
  expect_identical(shown, c("4 s", "65 s", "12 min", "2 h", "2 h 5 min"))
})

test_that("in a live console lines are above a bar with step, loss, speed and time left", {
  local_mocked_bindings(is_live_console = function() TRUE, message_connection = function() stdout())
  withr::local_options(cli.dynamic = TRUE, cli.ansi = TRUE, cli.num_colors = 1L, cli.width = 100)
  shown <- capture.output({
    progress <- new_progress()
    progress("begin", list(text = "Starting 2 workers ..."))
    progress("step", step_event())
    progress("step", step_event(step = 10L, rows = 320L, seconds = 1))
    progress("line", list(text = "note: {braces} stay"))
    progress("epoch", list(text = "epoch 1/2  loss 0.7500"))
    progress("end")
  })
  shown <- paste(cli::ansi_strip(shown), collapse = "\n")
  expect_match(shown, "epoch 1/2 .* step 10/20  loss 0\\.7500  320 rows/s  ETA [0-9] s")
  expect_match(shown, "note: {braces} stay", fixed = TRUE)
})

test_that("in a live console a bar names the phases of a start until the first step", {
  local_mocked_bindings(is_live_console = function() TRUE, message_connection = function() stdout())
  withr::local_options(cli.dynamic = TRUE, cli.ansi = TRUE, cli.num_colors = 1L, cli.width = 100)
  shown <- capture.output({
    progress <- new_progress()
    progress("phase", list(name = "importing TensorFlow"))
    progress("phase", list(name = "taking the {first} step"))
    progress("step", step_event())
    progress("phase", list(name = "connecting to the other workers"))
    progress("end")
  })
  shown <- paste(cli::ansi_strip(shown), collapse = "\n")
  order <- c("importing", "taking the \\{first\\} step", "epoch 1/2", "connecting")
  expect_match(shown, paste(order, collapse = "(.|\n)*"))
})

test_that("messages and warnings of code that Python calls do not leave it by a handler", {
  local_mocked_bindings(message_connection = function() stdout())
  left <- "not left"
  shown <- capture.output(
    left <- tryCatch(
      {
        value <- keep_conditions({
          message("a message")
          warning("a warning")
          "its value"
        })
        value
      },
      condition = function(condition) "left"
    )
  )
  expect_identical(left, "its value")
  expect_identical(shown, "a message")
  expect_warning(signal_kept_warnings(), "a warning")
  expect_no_warning(signal_kept_warnings())
})

test_full("a training shows its beginning and its epochs, and nothing at verbose = 0", {
  skip_if_no_pybackend()
  train <- function(...) {
    barrier_train("local", dense_model, iris_arrays(), workers = 1, epochs = 2, ...)
  }
  texts <- capture.output(invisible(train()))
  # The first call of a session loads TensorFlow, and some phases of a start may last.
  lines <- grep("^[A-Za-z ]+ [.]{3}$", texts, value = TRUE, invert = TRUE)
  expect_match(lines[[1L]], "^Starting 1 worker")
  expect_match(lines[[2L]], "^epoch 1/2  loss ")
  expect_match(lines[[3L]], "^epoch 2/2  loss ")
  expect_silent(train(verbose = 0))
})

test_that("a session that is still to import TensorFlow says so", {
  skip_if_no_pybackend()
  expect_silent(announce_tensorflow(function() NULL, 0L))
  expect_silent(announce_tensorflow(reticulate::import("sys"), 1L))
  expect_false(is_imported("no_such_module"))
  expect_true(is_imported("sys"))
  local_mocked_bindings(is_imported = function(module) FALSE)
  expect_output(announce_tensorflow(function() NULL, 1L), "^Loading TensorFlow")
})
