# A simulation of RStudio, below rstudioapi, with RStudio's rules for jobs: units are integers and never
# decrease, complete progress ends a running job, and a removed job is unknown. No test runs in RStudio
# itself.
local_rstudio <- function(without = character(), frame = parent.frame()) {
  skip_if_not_installed("rstudioapi")
  ide <- rlang::env(jobs = list())
  change <- function(job, ...) {
    stopifnot(job %in% names(ide$jobs))
    ide$jobs[[job]] <- utils::modifyList(ide$jobs[[job]], list(...))
    invisible()
  }
  api <- list(
    versionInfo = function() list(version = numeric_version("2026.1")),
    addJob = function(name, status, progressUnits, actions, running, autoRemove, show) {
      stopifnot(is.integer(progressUnits), running)
      id <- sprintf("job-%d", length(ide$jobs) + 1L)
      ide$jobs[[id]] <- list(
        name = name,
        most = progressUnits,
        units = 0L,
        state = "running",
        output = character(),
        hides_console = show
      )
      id
    },
    addJobOutput = function(job, output, error) {
      change(job, output = c(ide$jobs[[job]]$output, output))
    },
    setJobProgress = function(job, units) {
      known <- ide$jobs[[job]]
      stopifnot(is.integer(units), units >= known$units)
      is_over <- units >= known$most && known$state == "running"
      change(job, units = units, state = if (is_over) "succeeded" else known$state)
    },
    setJobStatus = function(job, status) change(job, status = status),
    setJobState = function(job, state) change(job, state = state),
    removeJob = function(job) {
      stopifnot(job %in% names(ide$jobs))
      ide$jobs[[job]] <- NULL
    }
  )
  api <- api[setdiff(names(api), without)]
  names(api) <- paste0(".rs.api.", names(api))
  attach(api, name = "tools:rstudio")
  withr::defer(detach("tools:rstudio", character.only = TRUE), envir = frame)
  local_mocked_bindings(isAvailable = function(...) TRUE, .package = "rstudioapi", .env = frame)
  ide
}

# What Python tells during a training of two epochs.
tell_training <- function(progress) {
  progress("begin", list(text = "Starting 2 workers ..."))
  progress("step", list(epoch = 1L, epochs = 2L, step = 5L, steps = 20L, loss = 0.75))
  progress("epoch", list(text = "epoch 1/2  loss 0.7500", epoch = 1L, epochs = 2L))
}

local_quiet <- function(frame = parent.frame()) {
  local_mocked_bindings(show_event = function(...) NULL, .env = frame)
}

test_that("a training is a job with its epochs and metrics", {
  local_quiet()
  ide <- local_rstudio()
  progress <- new_progress()
  progress("line", list(text = "Loading TensorFlow ..."))
  expect_length(ide$jobs, 0L)
  tell_training(progress)
  job <- ide$jobs[["job-1"]]
  expect_identical(job$name, "tfdist: training")
  expect_identical(job$units, 499L)
  expect_identical(job$status, "epoch 1/2  loss 0.7500")
  expect_false(job$hides_console)
  # After a restart from a checkpoint.
  step <- list(epoch = 1L, epochs = 2L, step = 10L, steps = 20L, loss = 0.5)
  progress("step", step)
  expect_identical(ide$jobs[["job-1"]]$status, "epoch 1/2  step 10/20  loss 0.5000")
  progress("line", list(text = "note: careful"))
  progress("epoch", list(text = "epoch 2/2  loss 0.5000", epoch = 2L, epochs = 2L))
  # The model is still to come.
  expect_identical(ide$jobs[["job-1"]]$state, "running")
  progress("end")
  progress("close", list(outcome = "succeeded", text = NULL))
  job <- ide$jobs[["job-1"]]
  expect_identical(job$state, "succeeded")
  expect_identical(
    job$output,
    c(
      "Starting 2 workers ...\n",
      "epoch 1/2  loss 0.7500\n",
      "note: careful\n",
      "epoch 2/2  loss 0.5000\n"
    )
  )
})

test_that("a search is a job that counts its trials", {
  local_quiet()
  ide <- local_rstudio()
  progress <- new_progress()
  progress("trials", list(text = "Training 4 trials", done = 0L, total = 4L))
  progress("trials", list(text = "trial 2 (units=4)  loss 0.5000", done = 1L, total = 4L))
  job <- ide$jobs[["job-1"]]
  expect_identical(job$name, "tfdist: trials")
  expect_identical(
    job[c("units", "status")],
    list(units = 249L, status = "1 of 4 trials completed")
  )
})

test_that("a job of the pane ends as its training did", {
  local_quiet()
  ide <- local_rstudio()
  end <- function(outcome, text = NULL, status = NULL) {
    progress <- new_progress()
    tell_training(progress)
    if (!is.null(status)) {
      progress("status", list(status = status))
    }
    progress("close", list(outcome = outcome, text = text))
    ended <- unname(ide$jobs)
    ide$jobs <- list()
    if (length(ended)) ended[[1L]] else list(state = "removed")
  }
  failed <- end("failed", "worker 1 on node: no memory")
  expect_identical(failed$state, "failed")
  expect_identical(utils::tail(failed$output, 1L), "worker 1 on node: no memory\n")
  expect_identical(end("cancelled")$state, "cancelled")
  # A detached job goes on after an interrupt, and after the time to wait for it.
  expect_identical(end("left")$state, "removed")
  expect_identical(end("failed", "it goes on", status = "running")$state, "removed")
  expect_identical(end("failed", "it was cancelled", status = "cancelled")$state, "cancelled")
})

test_that("an error in the pane leaves the training alone", {
  ide <- local_rstudio(without = "addJobOutput")
  progress <- new_progress()
  expect_output(tell_training(progress), "epoch 1/2  loss 0.7500")
  expect_identical(ide$jobs[["job-1"]]$units, 0L)
  expect_silent(progress("close", list(outcome = "succeeded")))
})

test_that("there is no job without RStudio, without its functions, or if the option says so", {
  local_quiet()
  expect_false(has_job_pane())
  tell_training(new_progress())
  local({
    positron <- local_rstudio(without = "addJob")
    expect_false(has_job_pane())
    tell_training(new_progress())
    expect_length(positron$jobs, 0L)
  })
  ide <- local_rstudio()
  expect_true(has_job_pane())
  withr::local_options(tfdist.job_pane = FALSE)
  tell_training(new_progress())
  expect_length(ide$jobs, 0L)
  withr::local_options(tfdist.job_pane = "no")
  expect_snapshot(error = TRUE, train_mnist("local", limit = 64))
})

test_that("calls of Python end their job", {
  skip_if_no_pybackend()
  ide <- local_rstudio()
  main <- reticulate::py_run_string(
    paste(
      "import os, signal, time",
      "from pybackend.core.api.display import choose_lines",
      "from pybackend.core.errors import ClusterError",
      "def searches(outcome):",
      "    choose_lines(1).trials('Training 2 trials', 0, 2)",
      "    if outcome == 'failed':",
      "        raise ClusterError('no slots')",
      "    if outcome == 'cancelled':",
      "        os.kill(os.getpid(), signal.SIGINT)",
      "        time.sleep(60)",
      sep = "\n"
    )
  )
  for (outcome in c("succeeded", "failed", "cancelled")) {
    ide$jobs <- list()
    expect_output(tryCatch(
      call_python(main$searches, outcome),
      interrupt = function(interrupt) NULL,
      tfdist_error = function(error) NULL
    ))
    expect_identical(ide$jobs[["job-1"]]$state, outcome, info = outcome)
  }
})

test_full("a training, a search and a detached job are jobs of the pane", {
  skip_if_no_pybackend()
  ide <- local_rstudio()
  ended <- function() {
    job <- ide$jobs[[1L]]
    ide$jobs <- list()
    job
  }
  train <- function(...) {
    barrier_train("local", dense_model, iris_arrays(), workers = 1, epochs = 2, ...)
  }
  shown <- capture.output(invisible(train()))
  job <- ended()
  expect_identical(job$state, "succeeded")
  expect_identical(job$units, 999L)
  expect_identical(job$output, paste0(shown[!startsWith(shown, "Loading")], "\n"))
  trials <- expand.grid(units = 3:4)
  build <- function(units) dense_model(units = units)
  capture.output(invisible(train_many("local", build, iris_arrays(), grid = trials)))
  job <- ended()
  expect_identical(job$state, "succeeded")
  expect_identical(job$status, "2 of 2 trials completed")
  withr::local_envvar(TFDIST_JOBS = withr::local_tempdir())
  detached <- submit_training(
    "local",
    dense_model(),
    iris_arrays(),
    workers = 1,
    verbose = 0
  )
  expect_length(ide$jobs, 0L)
  capture.output(invisible(detached$result(verbose = 1)))
  expect_identical(ended()$state, "succeeded")
})
