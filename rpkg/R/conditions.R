#' Errors raised by tfdist
#'
#' Every error that tfdist raises has the class `tfdist_error` and a more specific class, so that
#' `tryCatch()` can distinguish them:
#'
#' * `tfdist_error_input`: an argument, the model or the data cannot be used. Nothing was started.
#' * `tfdist_error_cluster`: workers cannot be started or reached, or the description of the cluster
#'   is invalid.
#' * `tfdist_error_worker_failed`: the training code failed on a worker. The error reports the first
#'   failure; its message lists the others.
#' * `tfdist_error_peer_lost`: a worker disappeared without reporting an error.
#' * `tfdist_error_serialization`: a model cannot be written or read back.
#' * `tfdist_error_database`: a database rejected a model, or its predictions differ from those of
#'   Keras.
#' * `tfdist_error_python`: the Python package is missing, or failed unexpectedly.
#'
#' The condition contains the fields of the worker's report: `rank` (from 0), `host`,
#' `exception_type` (the class of the Python exception), `traceback`, `log` (the last lines that the
#' worker printed) and `timeline` (what all workers did and when, a data frame as in [tfdist_fit]).
#' Unknown fields are `NULL`.
#'
#' @name tfdist_error
#' @examples
#' tryCatch(
#'   train_mnist("local", workers = 0),
#'   tfdist_error = function(error) conditionMessage(error)
#' )
NULL

# Python's exception classes, as R's condition classes.
condition_classes <- c(
  InputError = "tfdist_error_input",
  ClusterError = "tfdist_error_cluster",
  WorkerFailedError = "tfdist_error_worker_failed",
  PeerLostError = "tfdist_error_peer_lost",
  SerializationError = "tfdist_error_serialization",
  DatabaseError = "tfdist_error_database"
)

abort_tfdist <- function(message, class, ..., call = user_frame()) {
  # Up to the call that the error names: in scripts, rlang would also show the calls within it.
  trace <- if (!is.null(call)) rlang::trace_back(bottom = call)
  # Messages contain paths, code and Python text, which must not be formatted or wrapped.
  abort(message, class = c(class, "tfdist_error"), ..., trace = trace, call = call)
}

# The frame of the call that an error names: the outermost function of this package that led here,
# but inside any function that the user wrote. C code calls from the workspace (0), or from itself.
user_frame <- function() {
  parents <- sys.parents()
  number <- length(parents)
  found <- NULL
  while (number > 0L) {
    home <- environment(sys.function(number))
    if (identical(topenv(home), topenv())) {
      found <- sys.frame(number)
    } else if (!is.null(found) && !isNamespace(topenv(home))) {
      break
    }
    parent <- parents[[number]]
    is_known <- parent < number && (parent > 0L || identical(home, topenv()))
    number <- if (is_known) parent else number - 1L
  }
  found
}

# The parts of the message are those of rlang::abort().
abort_input <- function(...) {
  abort_tfdist(c(...), "tfdist_error_input")
}

abort_python <- function(error) {
  class <- unname(condition_classes[error$class])
  is_known <- !is.na(class)
  abort_tfdist(
    if (is_known) {
      as_sentences(error$message)
    } else {
      c(sprintf("%s: %s", error$class, error$message), i = traceback_tail(error$traceback))
    },
    if (is_known) class else "tfdist_error_python",
    rank = error$rank,
    host = error$host,
    exception_type = error$exception_type,
    traceback = error$traceback,
    log = as.character(unlist(error$log)),
    timeline = if (length(error$timeline)) timeline_frame(error$timeline)
  )
}

traceback_tail <- function(traceback, lines = 6L) {
  if (!is.null(traceback)) {
    rows <- strsplit(traceback, "\n", fixed = TRUE)[[1L]]
    paste(utils::tail(rows, lines), collapse = "\n")
  }
}

# Programs and packages that a message of Python may begin with.
lower_case_names <- c(
  c("bench-scale", "kubectl", "localhost", "mpirun", "onnxruntime", "pyspark", "reticulate"),
  c("sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"),
  c("sparklyr", "ssh", "tfdist")
)

# A message of Python in the style of R: it begins with a capital letter and ends with a full stop,
# and so does the advice in its last line. Names and code at its beginning stay unchanged.
as_sentences <- function(message) {
  # Python's errors of files begin with a number.
  message <- gsub("\\[Errno -?[0-9]+\\] ", "", message)
  lines <- strsplit(message, "\n", fixed = TRUE)[[1L]]
  if (!length(lines)) {
    return(message)
  }
  if (begins_with_word(lines[[1L]])) {
    substr(lines[[1L]], 1L, 1L) <- toupper(substr(lines[[1L]], 1L, 1L))
  }
  # The second line of a message without paragraphs continues the first.
  is_whole <- length(lines) == 1L || !nzchar(lines[[2L]])
  is_sentence <- c(is_whole, startsWith(lines[-1L], "What to do: "))
  is_open <- is_sentence & grepl("[^.!?:[:space:]]$", lines) & !grepl("://[^[:space:]]*$", lines)
  lines[is_open] <- paste0(lines[is_open], ".")
  paste(lines, collapse = "\n")
}

# FALSE if a text begins with code, a path, or the name of an argument, a program or a package.
begins_with_word <- function(text) {
  first <- sub(" .*", "", text)
  is_word <- grepl("^[a-z]+([-'][a-z]+)*[,:;]?$", first) && !grepl("^[a-z]+ = ", text)
  is_word && !sub("('s|[,:;])$", "", first) %in% lower_case_names
}

# Message of an error of another package, without the calls that led to it.
last_message <- function(error) {
  while (!is.null(error$parent)) {
    error <- error$parent
  }
  gsub("\\s+", " ", cli::ansi_strip(conditionMessage(error)))
}

# The value of code of another package; its errors become errors of an argument.
or_abort <- function(code, problem, ...) {
  tryCatch(code, error = function(error) {
    abort_input(problem, x = last_message(error), ...)
  })
}
