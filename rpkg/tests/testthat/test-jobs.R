local_jobs <- function(frame = parent.frame()) {
  folder <- withr::local_tempdir(.local_envir = frame)
  withr::local_envvar(TFDIST_JOBS = folder, .local_envir = frame)
  folder
}

flowers <- function(call, ..., model = dense_model()) {
  settings <- list(workers = 2, epochs = 2, seed = 1, verbose = 0, ...)
  do.call(call, c(list("local", model, quote(iris), Species ~ .), settings))
}

test_that("a job outlives its session and gives the fit of barrier_train()", {
  skip_if_no_pybackend()
  local_jobs()
  model <- dense_model()
  job <- flowers(submit_training, model = model)
  expect_s3_class(job, "tfdist_job")
  # As a new session finds it.
  again <- attach_job(substring(job$id, nchar(job$id) - 5L))
  fit <- again$result(verbose = 0)
  expect_identical(job$status(), "finished")
  here <- flowers(barrier_train, model = model)
  expect_identical(fit_weights(fit), fit_weights(here))
  expect_identical(fit$history, here$history)
  expect_identical(predict(fit, iris), predict(here, iris))
  expect_identical(fit$levels, levels(iris$Species))
  expect_identical(fit$call, here$call)
  expect_identical(job$result(verbose = 0)$model_sha256, fit$model_sha256)
  listed <- jobs()
  expect_identical(listed$id, job$id)
  expect_identical(listed$status, "finished")
  expect_output(print(job), paste0(job$id, ": finished, epoch 2/2"), fixed = TRUE)
  expect_true(any(grepl("epoch 2/2", job$logs())))
  expect_error(job$cancle(), "Did you mean `cancel`?", fixed = TRUE, class = "tfdist_error_input")
  # Python finds it, too.
  python <- pybackend()$attach_job(job$id, folder = jobs_folder())
  expect_identical(python$result(verbose = 0L)$model_sha256, fit$model_sha256)
  job$remove()
  expect_identical(nrow(jobs()), 0L)
  expect_error(job$status(), "was removed", class = "tfdist_error_input")
})

test_that("a damaged job is listed and can be removed", {
  skip_if_no_pybackend()
  folder <- local_jobs()
  Sys.chmod(folder, "700")
  id <- "20261128-141820-5a15f0"
  dir.create(file.path(folder, id), mode = "0700")
  listed <- jobs()
  expect_identical(listed$id, id)
  expect_identical(listed$status, "unreadable")
  expect_identical(listed$workers, NA_integer_)
  expect_identical(listed$host, NA_character_)
  expect_true(is.na(listed$submitted))
  job <- attach_job(id)
  expect_output(print(job), "unreadable: job.json is missing", fixed = TRUE)
  expect_error(job$result(), "job.json is missing", class = "tfdist_error_serialization")
  file.create(file.path(folder, id, "lock"))
  Sys.setFileTime(file.path(folder, id, "lock"), Sys.time() - 3600)
  job$remove()
  expect_identical(nrow(jobs()), 0L)
})

test_that("what has no job is named", {
  skip_if_no_pybackend()
  local_jobs()
  expect_error(attach_job("abc"), "There is no job", class = "tfdist_error_input")
  expect_error(attach_job(1), class = "tfdist_error_input")
  expect_error(flowers(submit_training, folder = 3), "folder", class = "tfdist_error_input")
  expect_error(
    flowers(submit_training, callbacks = observer(function(epoch, logs) FALSE)),
    "attach_job(..., callbacks",
    fixed = TRUE,
    class = "tfdist_error_input"
  )
})

test_full("a job is cancelled, and one that fails raises its error", {
  skip_if_no_pybackend()
  local_jobs()
  job <- submit_training("local", dense_model(), iris, Species ~ ., epochs = 100000, verbose = 0)
  expect_identical(job$cancel(), "cancelled")
  expect_error(job$result(verbose = 0), "was cancelled", class = "tfdist_error_cluster")
  broken <- submit_training(
    "local",
    data = list(array(0, c(8, 4)), numeric(8)),
    model_fn = function() stop("no model today"),
    verbose = 0
  )
  expect_error(broken$result(verbose = 0), "no model today")
})
