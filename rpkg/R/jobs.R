#' Jobs that outlive their session
#'
#' [submit_training()] hands training over to a process of its own and returns a job. You may then
#' restart R, log out of the machine or close RStudio. `attach_job()` returns the job in another
#' session, also if it was submitted in Python. `jobs()` lists all jobs.
#'
#' @section Methods of a job:
#' * `job$status()`: `"running"`, `"finished"`, `"failed"`, `"cancelled"`, `"lost"` or
#'   `"unreadable"`. Lost: the process that drove the job was killed, or its machine restarted. Its
#'   workers ended, too. Make the same call again, with `recovery(folder, resume = TRUE)` if it
#'   wrote checkpoints. Unreadable: a file of the job is damaged, or the folder belongs to another
#'   user. Printing the job shows the reason.
#' * `job$result(seconds = NULL, verbose = NULL)`: waits for the end, at most this number of seconds
#'   if it is given, and returns the [tfdist_fit]. If training failed, it raises the error of
#'   [barrier_train()]. `verbose` is that of the call that submitted the job, unless it is given.
#'   Interrupting it only ends the waiting.
#' * `job$logs()`: a character vector of epochs, notes and what the workers printed.
#' * `job$cancel()`: stops the workers, waits until they have ended, and returns the status.
#' * `job$remove()`: removes the folder of a job that has ended, with its result.
#'
#' `job$id` and `job$folder` are its id and its folder.
#' @param id Id of a job, or enough of its end to be unique.
#' @param callbacks [observer()] objects. While this session waits for the job, their functions are
#'   called for the epochs and steps that end from now on. The workers do not wait for them:
#'   training stops soon after one returns `TRUE`.
#' @param folder Folder with the jobs, or URI with their copies. `NULL` (default): the environment
#'   variable `TFDIST_JOBS`, or `~/.local/state/tfdist/jobs`.
#' @return
#' * `attach_job()`: an object of class `tfdist_job`.
#' * `jobs()`: a data frame with a row for each job, the oldest first: `id`, `status`, `submitted`,
#'   `host`, `where`, `workers`, `epochs` and `folder`.
#' @section Errors:
#' `tfdist_error_input` if there is no such job, or if a job to remove is running;
#' `tfdist_error_cluster` from `job$result()` if the job was cancelled or lost.
#' @seealso [submit_training()]
#' @export
#' @examples
#' \dontrun{
#' job <- submit_training("local", model, iris, Species ~ ., epochs = 50)
#' job
#' # In another session:
#' job <- attach_job("5a15f0")
#' fit <- job$result()
#' }
attach_job <- function(id, callbacks = NULL, folder = NULL) {
  check_given()
  check_string(id)
  check_string(folder, allow_null = TRUE)
  callbacks <- as_python_callbacks(check_callbacks(callbacks))
  attach <- pybackend()$attach_job
  as_job(call_python(attach, id, callbacks = callbacks, folder = jobs_folder(folder)))
}

#' @rdname attach_job
#' @export
jobs <- function(folder = NULL) {
  check_string(folder, allow_null = TRUE)
  found <- call_bridge("list_jobs", jobs_folder(folder))
  text <- NA_character_
  # An unreadable job has only an id, a status and a folder.
  origin <- list(id = text, status = text, submitted = no_time, host = text, where = text)
  frame_of(found, c(origin, list(workers = NA_integer_, epochs = NA_integer_, folder = text)))
}

#' @export
`$.tfdist_job` <- function(x, name) {
  methods <- job_methods(x)
  found <- methods[[name]] %||% .subset2(x, name)
  if (is.null(found) && !name %in% c("python", "own")) {
    abort_no_element(name, c("id", "folder", names(methods)), "tfdist_job")
  }
  found
}

#' @exportS3Method utils::.DollarNames
.DollarNames.tfdist_job <- function(x, pattern = "") {
  names <- c("id", "folder", paste0(names(job_methods(x)), "()"))
  grep(pattern, names, value = TRUE)
}

job_methods <- function(job) {
  call_job <- function(fn, ...) call_python(fn, ..., stops_workers = FALSE)
  list(
    status = function() call_job(pybackend()$bridge$job_status, find_job(job)),
    result = function(seconds = NULL, verbose = getOption("tfdist.verbose")) {
      answer <- call_job(pybackend()$bridge$job_result, find_job(job), seconds, verbose)
      # A job of Python has no part of R.
      make_fit(answer, .subset2(job, "own") %||% read_own_part(job))
    },
    logs = function() as.character(unlist(call_job(find_job(job)$logs))),
    cancel = function() call_job(find_job(job)$cancel),
    remove = function() invisible(call_job(find_job(job)$remove))
  )
}

#' @export
print.tfdist_job <- function(x, ...) {
  text <- call_python(find_job(x)$describe, stops_workers = FALSE)
  cat(sprintf("<tfdist_job> %s: %s\n", x$id, text))
  cat(sprintf("  %s\n", paste0("$", names(job_methods(x)), "()", collapse = " ")))
  invisible(x)
}

# A submitted job. `own` is what only R knows of the fit: the arguments of new_fit().
new_job <- function(job, own) {
  options <- own$settings$model_options
  own$settings <- c(plain_settings(own$settings), list(model_options = options))
  own$call <- plain_call(own$call)
  # Objects of Python do not outlive the session; the job has them, too.
  stored <- own
  stored$settings$model_options["custom_objects"] <- list(NULL)
  path <- own_part(job$folder)
  temporary <- paste0(path, ".new")
  saveRDS(stored, temporary)
  Sys.chmod(temporary, "600")
  file.rename(temporary, path)
  as_job(job, own)
}

as_job <- function(job, own = NULL) {
  structure(list(id = job$id, folder = job$folder, python = job, own = own), class = "tfdist_job")
}

own_part <- function(folder) file.path(folder, "fit.rds")

# Python has checked that only this user can write to the folder.
read_own_part <- function(job) {
  path <- own_part(job$folder)
  if (file.exists(path)) {
    tryCatch(readRDS(path), error = function(error) {
      text <- sprintf("%s is damaged: %s.", path, conditionMessage(error))
      advice <- "`pybackend.attach_job()` in Python reads the result without it."
      abort_tfdist(c(text, i = advice), "tfdist_error_serialization", call = NULL)
    })
  }
}

find_job <- function(job) {
  python <- .subset2(job, "python")
  if (!reticulate::py_is_null_xptr(python)) {
    return(python)
  }
  # From an earlier session, by saveRDS().
  pybackend()$attach_job(job$id, folder = dirname(job$folder))
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
  as_python_setting(folder %||% if (nzchar(set)) set)
}
