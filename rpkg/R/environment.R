# TensorFlow has releases for these alone.
python_range <- ">=3.10,<3.14"

# The Python that the environment is made with: a path.
find_python <- function(python, call = caller_env()) {
  found <- reticulate::virtualenv_starter(python %||% python_range)
  if (is.null(found)) {
    wanted <- if (is.null(python)) "Python from 3.10 to 3.13" else sprintf("Python %s", python)
    abort_input(
      c(
        sprintf("No %s was found on this machine.", wanted),
        i = "`reticulate::install_python(\"3.12\")` installs one; or name its path in `python`."
      ),
      call = call
    )
  }
  version <- version_of_python(found, call)
  if (version < "3.10" || version >= "3.14") {
    abort_input(
      c(
        sprintf("%s is Python %s; TensorFlow has releases for 3.10 to 3.13.", found, version),
        i = "Leave out `python` to use the newest of these on this machine."
      ),
      call = call
    )
  }
  found
}

version_of_python <- function(python, call) {
  program <- "import sys; print('%d.%d.%d' % sys.version_info[:3])"
  answer <- suppressWarnings(system2(python, c("-c", shQuote(program)), stdout = TRUE))
  version <- numeric_version(utils::tail(c("", answer), 1L), strict = FALSE)
  if (is.na(version)) {
    abort_input(sprintf("%s is not a Python that runs.", python), call = call)
  }
  version
}

create_environment <- function(envname, python, call = caller_env()) {
  path <- if (grepl("/", envname, fixed = TRUE)) {
    path.expand(envname)
  } else {
    file.path(path.expand(reticulate::virtualenv_root()), envname)
  }
  is_made <- FALSE
  # Half an environment would be taken for one at the next call.
  on.exit(if (!is_made) unlink(path, recursive = TRUE))
  run_logged(
    python,
    c("-m", "venv", path),
    title = sprintf("Creating the environment %s", path),
    problem = sprintf("Python cannot create the environment %s.", path),
    call = call
  )
  is_made <- TRUE
}

run_pip <- function(path, requirements, options = NULL, call = caller_env()) {
  run_logged(
    file.path(path, "bin", "python"),
    c("-m", "pip", "install", "--upgrade", "--no-input", "--disable-pip-version-check"),
    c(options, requirements),
    title = "Installing the Python half of tfdist",
    problem = sprintf("pip cannot install the Python half into %s.", path),
    call = call
  )
}

# Runs a program behind one line of progress. What it prints goes to a log, and the log's end into
# the error if the program fails.
run_logged <- function(program, ..., title, problem, call = caller_env()) {
  current <- ""
  cli::cli_progress_step("{title}{current}", msg_done = "{title}", msg_failed = "{title}")
  words <- paste(shQuote(c(program, ...)), collapse = " ")
  # The shell's process id is the program's own after exec.
  output <- pipe(sprintf("echo $$; exec %s 2>&1 </dev/null", words), "r")
  pid <- as.integer(readLines(output, 1L))
  has_ended <- FALSE
  # A console that does not send Ctrl-C to the program as well: it ends here.
  on.exit(if (!has_ended) end_program(pid, output))
  log <- tempfile("install-tfdist-", fileext = ".log")
  while (length(line <- readLines(output, 1L, warn = FALSE))) {
    cat(line, "\n", sep = "", file = log, append = TRUE)
    current <- name_package(line) %||% current
    cli::cli_progress_update()
  }
  has_ended <- TRUE
  status <- close(output)
  if (!is.null(status) && status != 0L) {
    abort_logged(problem, log, call)
  }
  unlink(log)
}

end_program <- function(pid, output) {
  tools::pskill(pid, tools::SIGINT)
  close(output)
}

# What pip is at, from a line that it printed; NULL if the line does not tell.
name_package <- function(line) {
  pattern <- "^ *(Collecting|Downloading|Installing collected packages:?|Processing) +([^ ,<>=!~;]+).*"
  if (!grepl(pattern, line)) {
    return(NULL)
  }
  if (startsWith(trimws(line), "Installing")) {
    return(": unpacking")
  }
  sprintf(": %s", basename(sub("[[].*", "", sub(pattern, "\\2", line))))
}

abort_logged <- function(problem, log, call, lines = 8L) {
  printed <- if (file.exists(log)) readLines(log, warn = FALSE)
  abort_tfdist(
    c(
      problem,
      x = paste(c("It ended with:", utils::tail(printed, lines)), collapse = "\n"),
      i = sprintf("All that it printed is in %s, until R ends.", log)
    ),
    "tfdist_error_python",
    call = call
  )
}
