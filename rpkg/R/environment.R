# TensorFlow has releases only for these versions.
python_range <- ">=3.11,<3.14"

# Path of the Python that creates the environment.
find_python <- function(python) {
  found <- reticulate::virtualenv_starter(python %||% python_range)
  if (is.null(found)) {
    wanted <- if (is.null(python)) "Python from 3.11 to 3.13" else sprintf("Python %s", python)
    problem <- sprintf("No %s was found on this machine.", wanted)
    advice <- "`reticulate::install_python(\"3.12\")` installs one; or name its path in `python`."
    abort_input(problem, i = advice)
  }
  version <- version_of_python(found)
  if (version < "3.11" || version >= "3.14") {
    problem <- sprintf("%s is Python %s; TensorFlow has releases for 3.11 to 3.13.", found, version)
    abort_input(problem, i = "Leave out `python` to use the newest of these on this machine.")
  }
  found
}

version_of_python <- function(python) {
  program <- "import sys; print('%d.%d.%d' % sys.version_info[:3])"
  answer <- suppressWarnings(system2(python, c("-c", shQuote(program)), stdout = TRUE))
  version <- numeric_version(utils::tail(c("", answer), 1L), strict = FALSE)
  if (is.na(version)) {
    abort_input(sprintf("%s cannot be run as Python.", python))
  }
  version
}

create_environment <- function(envname, python) {
  is_path <- grepl("/", envname, fixed = TRUE)
  path <- if (is_path) envname else file.path(reticulate::virtualenv_root(), envname)
  path <- path.expand(path)
  is_made <- FALSE
  # The next call would take a partial environment for a complete one.
  on.exit(if (!is_made) unlink(path, recursive = TRUE))
  run_logged(
    python,
    c("-m", "venv", path),
    title = sprintf("Creating the environment %s", path),
    problem = sprintf("Python cannot create the environment %s.", path)
  )
  is_made <- TRUE
}

run_pip <- function(path, requirements, options = NULL) {
  run_logged(
    file.path(path, "bin", "python"),
    c("-m", "pip", "install", "--upgrade", "--no-input", "--disable-pip-version-check"),
    c(options, requirements),
    title = "Installing the Python package of tfdist",
    problem = sprintf("pip cannot install the Python package into %s.", path)
  )
}

# Run a program with one line of progress. Its output goes to a log, whose last lines are in the
# error if the program fails.
run_logged <- function(program, ..., title, problem) {
  current <- ""
  cli::cli_progress_step("{title}{current}", msg_done = "{title}", msg_failed = "{title}")
  folder <- tempfile("install-tfdist-")
  dir.create(folder)
  run <- start_program(c(program, ...), folder)
  has_ended <- FALSE
  # An interrupt comes while R sleeps; a console may send Ctrl-C only to R.
  # `add = TRUE`: cli's own on.exit() in this frame ends the line of progress.
  on.exit(if (!has_ended) end_program(run), add = TRUE)
  while (!file.exists(run$status)) {
    Sys.sleep(0.1)
    for (line in readLines(run$lines, warn = FALSE)) {
      current <- name_package(line) %||% current
    }
    # On other consoles each update would be a new line.
    if (cli::is_dynamic_tty()) {
      cli::cli_progress_update()
    }
  }
  has_ended <- TRUE
  close_program(run)
  if (scan(run$status, quiet = TRUE) != 0) {
    abort_logged(problem, run$log)
  }
  unlink(folder, recursive = TRUE)
}

# Start a program in a shell that waits for it: in a shell's background it would ignore Ctrl-C.
start_program <- function(words, folder) {
  names <- rlang::set_names(c("log", "pid", "status"))
  files <- lapply(names, function(name) file.path(folder, name))
  file.create(files$log)
  quoted <- lapply(files, shQuote)
  inner <- sprintf("echo $$ >%s; exec %s", quoted$pid, paste(shQuote(words), collapse = " "))
  # The status is written by renaming a file, so it is complete if it exists.
  outer <- "sh -c %1$s >%2$s 2>&1 </dev/null; echo $? >%3$s; mv %3$s %4$s"
  outer <- sprintf(outer, shQuote(inner), quoted$log, quoted$pid, quoted$status)
  c(files, shell = list(pipe(outer, "r")), lines = list(file(files$log, "r", blocking = FALSE)))
}

end_program <- function(run) {
  pid <- if (file.exists(run$pid)) readLines(run$pid, warn = FALSE)
  if (length(pid)) {
    tools::pskill(as.integer(pid), tools::SIGINT)
  }
  # Closing waits until the program has exited.
  close_program(run)
  unlink(dirname(run$log), recursive = TRUE)
}

close_program <- function(run) {
  for (connection in run[c("lines", "shell")]) {
    close(connection)
  }
}

# What pip is working on, from a line of its output; NULL if the line does not show it.
name_package <- function(line) {
  pattern <- "^ *(Collecting|Downloading|Processing) +([^ ,<>=!~;]+).*"
  if (startsWith(trimws(line), "Installing collected packages")) {
    ": unpacking"
  } else if (grepl(pattern, line)) {
    file <- basename(sub("[[].*", "", sub(pattern, "\\2", line)))
    sprintf(": %s", sub("^([^-]+-[^-]+)-.*[.]whl$", "\\1", file))
  }
}

abort_logged <- function(problem, log, lines = 8L) {
  printed <- if (file.exists(log)) readLines(log, warn = FALSE)
  last <- paste(c("Its last lines:", utils::tail(printed, lines)), collapse = "\n")
  whole <- sprintf("Its complete output is in %s until R exits.", log)
  abort_tfdist(c(problem, x = last, i = whole), "tfdist_error_python")
}

#' Pack a Python environment for workers on other hosts
#'
#' Writes the packages, the interpreter and the standard library of a Python environment to one
#' file, for the argument `environment` of [resources()]. Then nothing needs to be installed on the
#' workers' hosts. Without a file, `resources(environment = "this")` packs the environment in each
#' session again.
#'
#' The file works in any folder where it is unpacked, with `bin/python` as its Python. Equal
#' environments give files with equal digests. Left out are files that no worker needs: PySpark's
#' jars, TensorFlow's C++ headers, tests of the standard library, and packages that are folders of
#' sources (`pip install -e`). tfdist itself is always sent with the job.
#'
#' @param path File to write, which ends with `.tar.gz`.
#' @param environment `"this"` (default): the environment of this session, such as the one that
#'   [install_tfdist()] made. Or the folder of a virtual environment on this machine. For conda
#'   environments use conda-pack, whose files [resources()] accepts.
#' @return `path`, invisibly. A message shows the size of the file and what it contains.
#' @export
#' @examplesIf FALSE
#' pack_environment("environment.tar.gz")
#' fit <- train_mnist(sc, workers = 3, resources = resources(environment = "environment.tar.gz"))
pack_environment <- function(path = "environment.tar.gz", environment = "this") {
  check_string(path)
  check_string(environment)
  packed <- call_python(pybackend()$pack_environment, path, environment)
  rlang::inform(packed$summary())
  invisible(path)
}
