read_run <- function(path) {
  text <- paste(readLines(path, encoding = "UTF-8"), collapse = "\n")
  found <- regmatches(text, regexec("id=\"tfdist-run\">(.*)</script>", text))[[1L]][[2L]]
  jsonlite::fromJSON(found, simplifyVector = FALSE)
}

test_that("the page of a fit has its numbers, also after readRDS()", {
  skip_if_no_pybackend()
  folder <- withr::local_tempdir()
  fit <- train_flowers(iris, epochs = 2)
  path <- file.path(folder, "run.html")
  expect_identical(report(fit, path, title = "Flowers"), path)
  run <- read_run(path)
  expect_identical(unlist(run$history$loss), fit$history$loss)
  expect_identical(run$model_sha256, fit$model_sha256)
  expect_length(run$workers[[1L]]$step_times$quantiles, 21L)
  expect_match(run$model_summary, "dense")

  # As in another session.
  saveRDS(fit, file.path(folder, "fit.rds"))
  kept <- readRDS(file.path(folder, "fit.rds"))
  kept$decoded <- new.env(parent = emptyenv())
  report(kept, file.path(folder, "kept.html"), title = "Flowers")
  expect_identical(read_run(file.path(folder, "kept.html")), run)
})

test_that("a failure has a page", {
  skip_if_no_pybackend()
  path <- withr::local_tempfile(fileext = ".html")
  failure <- structure(
    class = c("tfdist_error_worker_failed", "tfdist_error", "rlang_error", "error", "condition"),
    list(
      message = "worker 1 on node failed: ValueError: <bad>\nTraceback ...",
      rank = 1L,
      host = "node",
      exception_type = "ValueError",
      traceback = "Traceback ...",
      log = "last line",
      timeline = timeline_frame(list(
        list(time = 1.5e9, state = "started", reason = "PID 7", rank = 1, host = "node")
      ))
    )
  )
  expect_invisible(report(failure, path))
  run <- read_run(path)
  moment <- list(time = 1.5e9, state = "started", reason = "PID 7", rank = 1L, host = "node")
  expect_equal(run$timeline, list(moment))
  found <- run$failures[[1L]]
  expect_identical(found$message, "worker 1 on node failed: ValueError: <bad>")
  expect_identical(found$rank, 1L)
  expect_identical(unlist(found$log), "last line")
})

test_that("restarts are a data frame", {
  restarts <- restart_frame(list(
    list(time = 1.5e9, lost = "worker 1 was killed", checkpoint = "epoch 1"),
    list(time = 1.6e9, lost = "worker 0 was killed", checkpoint = NULL)
  ))
  expect_identical(restarts$checkpoint, c("epoch 1", NA))
  expect_s3_class(restarts$time, "POSIXct")
  expect_identical(nrow(example_fit()$restarts), 0L)
})

test_that("what cannot be reported is an error at once", {
  expect_snapshot(error = TRUE, {
    report(iris, "run.html")
    report(example_fit(), "run.pdf")
    report(example_fit(), "absent/run.html")
    report(example_fit(), "run.html", title = 7)
  })
})
