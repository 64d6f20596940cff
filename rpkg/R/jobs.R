#' Jobs that outlive their session
#'
#' `barrier_train(..., detach = TRUE)` hands training over to a process of its own and returns a
#' job. You may then restart R, log out of the machine or close RStudio. `attach_job()` returns the
#' job in another session, also if it was submitted in Python. `jobs()` lists all jobs.
#'
#' Interrupting `job_result()` only ends the waiting. A job whose status is `"lost"` ended because
#' the process that drove it was killed, or its machine restarted. Its workers ended, too. Make the
#' same call again, with `checkpoint(folder, resume = TRUE)` if it wrote checkpoints.
#'
#' @param id Id of a job, or enough of its end to be unique.
#' @param callbacks [observer()] objects. While this session waits for the job, their functions are
#'   called for the epochs and steps that end from now on. The workers do not wait for them:
#'   training stops soon after one returns `TRUE`.
#' @param folder Folder with the jobs, or URI with their copies. `NULL` (default): the environment
#'   variable `TFDIST_JOBS`, or `~/.local/state/tfdist/jobs`.
#' @param job A job.
#' @param seconds Maximum time to wait. `NULL` (default): any time.
#' @param verbose As in [barrier_train()]. `NULL` (default): as in the call that submitted the job.
#'
#' @return
#' * `attach_job()`: an object of class `tfdist_job`.
#' * `jobs()`: a data frame with a row for each job, the oldest first: `id`, `status`, `submitted`,
#'   `host`, `where`, `workers`, `epochs` and `folder`.
#' * `job_status()`: `"running"`, `"finished"`, `"failed"`, `"cancelled"`, `"lost"` or
#'   `"unreadable"`. Unreadable: a file of the job is damaged, or the folder belongs to another
#'   user. Printing the job shows the reason.
#' * `job_result()`: the [tfdist_fit] of the call without `detach`. If training failed, it raises
#'   the error of that call.
#' * `job_logs()`: a character vector of epochs, notes and what the workers printed.
#' * `job_cancel()`: the status, after the workers have ended.
#' * `job_remove()`: nothing. It removes the folder of a job that has ended, with its result.
#' @section Errors:
#' `tfdist_error_input` if there is no such job, or if a job to remove is running;
#' `tfdist_error_cluster` from `job_result()` if the job was cancelled or lost.
#' @seealso [barrier_train()]
#' @export
#' @examples
#' \dontrun{
#' job <- barrier_train("local", model, iris, Species ~ ., epochs = 50, detach = TRUE)
#' job
#' # In another session:
#' job <- attach_job("5a15f0")
#' fit <- job_result(job)
#' }
attach_job <- function(id, callbacks = NULL, folder = NULL) {
  check_given()
  check_string(id)
  check_string(folder, allow_null = TRUE)
  callbacks <- check_callbacks(callbacks)
  call <- rlang::current_env()
  job <- call_python(
    pybackend(call)$attach_job,
    id,
    callbacks = as_python_callbacks(callbacks, call),
    folder = jobs_folder(folder),
    call = call
  )
  structure(list(id = job$id, folder = job$folder, python = job), class = "tfdist_job")
}

#' @rdname attach_job
#' @export
jobs <- function(folder = NULL) {
  check_string(folder, allow_null = TRUE)
  call <- rlang::current_env()
  found <- call_python(pybackend(call)$bridge$list_jobs, jobs_folder(folder), call = call)
  # An unreadable job has only an id, a status and a folder.
  text <- function(name) vapply(found, function(job) job[[name]] %||% NA_character_, "")
  number <- function(name) vapply(found, function(job) as.numeric(job[[name]] %||% NA), 0)
  data.frame(
    id = text("id"),
    status = text("status"),
    submitted = as.POSIXct(number("submitted"), origin = "1970-01-01"),
    host = text("host"),
    where = text("where"),
    workers = as.integer(number("workers")),
    epochs = as.integer(number("epochs")),
    folder = text("folder")
  )
}

#' @rdname attach_job
#' @export
job_status <- function(job) {
  call <- rlang::current_env()
  status <- pybackend(call)$bridge$job_status
  call_python(status, find_job(job, call), call = call, stops_workers = FALSE)
}

#' @rdname attach_job
#' @export
job_logs <- function(job) as.character(unlist(call_job(job, "logs")))

#' @rdname attach_job
#' @export
job_result <- function(job, seconds = NULL, verbose = getOption("tfdist.verbose")) {
  seconds <- if (!is.null(seconds)) check_positive(seconds)
  verbose <- if (!is.null(verbose)) check_verbose(verbose)
  call <- rlang::current_env()
  result <- call_python(
    pybackend(call)$bridge$job_result,
    find_job(job, call),
    seconds,
    verbose,
    call = call,
    stops_workers = FALSE
  )
  own <- job$own %||% read_own_part(job)
  if (is.null(own)) {
    # A job of Python.
    return(new_fit(result))
  }
  do.call(new_fit, c(list(result), own), quote = TRUE)
}

#' @rdname attach_job
#' @export
job_cancel <- function(job) call_job(job, "cancel")

#' @rdname attach_job
#' @export
job_remove <- function(job) invisible(call_job(job, "remove"))

#' @export
print.tfdist_job <- function(x, ...) {
  cat(sprintf("<tfdist_job> %s: %s\n", x$id, call_job(x, "describe")))
  invisible(x)
}

# A submitted job. `own` is what only R knows of the fit: the arguments of new_fit().
new_job <- function(job, own) {
  own$settings <- plain_settings(own$settings)
  own$call <- plain_call(own$call)
  # Objects of Python do not outlive the session; the job has them, too.
  stored <- replace(own, "custom_objects", list(NULL))
  path <- own_part(job$folder)
  temporary <- paste0(path, ".new")
  saveRDS(stored, temporary)
  Sys.chmod(temporary, "600")
  file.rename(temporary, path)
  structure(list(id = job$id, folder = job$folder, python = job, own = own), class = "tfdist_job")
}

own_part <- function(folder) file.path(folder, "fit.rds")

# job_result() has checked that only this user can write to the folder.
read_own_part <- function(job) {
  path <- own_part(job$folder)
  if (file.exists(path)) {
    tryCatch(
      readRDS(path),
      error = function(error) {
        text <- sprintf("%s is damaged: %s.", path, conditionMessage(error))
        advice <- "`pybackend.attach_job()` in Python reads the result without it."
        abort_tfdist(c(text, i = advice), "tfdist_error_serialization", call = NULL)
      }
    )
  }
}

call_job <- function(job, method, ..., call = caller_env()) {
  python <- find_job(job, call)
  call_python(python[[method]], ..., call = call, stops_workers = FALSE)
}

find_job <- function(job, call) {
  check_given(call)
  if (!inherits(job, "tfdist_job")) {
    abort_expected(job, "a job, as `attach_job()` returns it", FALSE, "job", call)
  }
  if (!reticulate::py_is_null_xptr(job$python)) {
    return(job$python)
  }
  # From an earlier session, by saveRDS().
  pybackend(call)$attach_job(job$id, folder = dirname(job$folder))
}

# Python does not see variables that this session sets after Python has started. A driver finds the
# server of Spark Connect by this one.
share_address <- function() {
  set <- Sys.getenv("SPARK_REMOTE")
  if (nzchar(set)) {
    reticulate::import("os")$environ$update(list(SPARK_REMOTE = set))
  }
}

# The same for the folder of all jobs.
jobs_folder <- function(folder = NULL) {
  set <- Sys.getenv("TFDIST_JOBS")
  folder <- folder %||% if (nzchar(set)) set
  if (!is.null(folder)) path.expand(folder)
}
