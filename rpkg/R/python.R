is_python <- function(x) inherits(x, "python.builtin.object")

needed_reticulate <- "1.39"

no_module <- "It has no module pybackend."

# The Python module, imported when it is first needed.
pybackend <- function() {
  if (is.null(the$pybackend)) {
    the$pybackend <- load_pybackend()
    warn_other_version(the$pybackend$`__version__`)
  }
  the$pybackend
}

load_pybackend <- function() {
  # R itself checks the versions of packages from which NAMESPACE imports: see .onLoad().
  loadNamespace("reticulate", versionCheck = list(op = ">=", version = needed_reticulate))
  # Once Python runs, this session cannot change to another one. So look first, and if pybackend is
  # absent, leave the session free for install_tfdist().
  if (!reticulate::py_available()) {
    local_no_managed_python()
    find_pybackend()
  }
  tryCatch(
    {
      reticulate::import("pybackend.bridge")
      reticulate::import("pybackend.core.words")$speak("R")
      reticulate::import("pybackend")
    },
    error = function(error) {
      # The second line of reticulate's message is about its own traceback.
      reason <- sub("\nRun `reticulate::.*", "", cli::ansi_strip(conditionMessage(error)))
      abort_no_pybackend(running_python(), reason)
    }
  )
}

# Suppress the start-up lines of Keras and TensorFlow, no matter which code imports them.
quiet_imports <- function() {
  module <- "pybackend.core.quiet"
  tryCatch(reticulate::import(module)$install(), error = function(error) NULL)
}

# If reticulate found no Python, it would download one, without pybackend. A session that declared
# tfdist with py_require() may use that one.
local_no_managed_python <- function(frame = parent.frame()) {
  set <- Sys.getenv("RETICULATE_USE_MANAGED_VENV", unset = NA)
  if (!is.na(set) || requires_tfdist()) {
    return(invisible())
  }
  Sys.setenv(RETICULATE_USE_MANAGED_VENV = "no")
  restore <- as.call(list(function() Sys.unsetenv("RETICULATE_USE_MANAGED_VENV")))
  do.call(on.exit, list(restore, add = TRUE), envir = frame)
}

requires_tfdist <- function() {
  # py_require() came with reticulate 1.41.
  if (!"py_require" %in% getNamespaceExports("reticulate")) {
    return(FALSE)
  }
  required <- getExportedValue("reticulate", "py_require")()
  any(grepl("^tfdist\\b", required$packages))
}

# The Python that reticulate would choose, without starting it; `problem` if it finds none.
discover_python <- function() {
  local_no_managed_python()
  tryCatch(
    reticulate::py_discover_config("pybackend", use_environment = "r-tfdist"),
    error = function(error) list(problem = conditionMessage(error))
  )
}

# The Python that has pybackend, without starting it.
find_pybackend <- function() {
  config <- discover_python()
  if (is.null(config$required_module_path)) {
    abort_no_pybackend(config, if (!is.null(config$python)) no_module)
  }
  config
}

running_python <- function() {
  if (reticulate::py_available()) reticulate::py_config() else discover_python()
}

has_pybackend <- function() is.null(pybackend_problem())

# Reason why pybackend cannot be used, or NULL. Starts Python only if it has pybackend.
pybackend_problem <- function() {
  if (is.null(the$pybackend) && !reticulate::py_available()) {
    config <- discover_python()
    if (is.null(config$required_module_path)) {
      return(config$problem %||% no_module)
    }
  }
  tryCatch(
    {
      pybackend()
      NULL
    },
    tfdist_error_python = function(error) error$reason
  )
}

describe_python <- function(config) {
  if (is.null(config$python)) {
    return(paste(c("none was found", config$problem), collapse = ": "))
  }
  sprintf("%s (%s), %s", config$python, config$version, python_reason(config))
}

python_reason <- function(config) {
  if (any(startsWith(as.character(config$forced), "import("))) {
    "the environment of tfdist"
  } else if (length(config$forced)) {
    sprintf("chosen by %s", config$forced)
  } else if (nzchar(config$virtualenv %||% "")) {
    sprintf("from the virtual environment %s", config$virtualenv)
  } else {
    "the first on the search path"
  }
}

abort_no_pybackend <- function(config, reason) {
  abort_tfdist(
    c(
      "The Python package pybackend, which does the training, cannot be imported.",
      x = sprintf("Python: %s.", describe_python(config)),
      x = reason,
      i = sprintf("%s.", how_to_install()),
      i = "`tfdist::tfdist_sitrep()` shows what was found."
    ),
    "tfdist_error_python",
    reason = reason
  )
}

# RETICULATE_PYTHON takes precedence over any environment that install_tfdist() creates.
how_to_install <- function() {
  chosen <- Sys.getenv("RETICULATE_PYTHON")
  if (nzchar(chosen)) {
    unset <- "Unset `RETICULATE_PYTHON` (%s; in .Renviron?), restart R, run"
    return(paste(sprintf(unset, chosen), "`tfdist::install_tfdist()`"))
  }
  again <- if (reticulate::py_available()) ", then restart R" else ""
  sprintf("Run `tfdist::install_tfdist()`%s", again)
}

own_version <- function() getNamespaceVersion("tfdist")[["version"]]

warn_other_version <- function(python_version) {
  if (identical(python_version, own_version())) {
    return(invisible())
  }
  advice <- if (is_older(python_version, own_version())) {
    "Run `tfdist::install_tfdist()`, then restart R."
  } else {
    "Install the R package of the same version as the Python package."
  }
  problem <- "The Python package is version %s and the R package %s; they must be the same."
  rlang::warn(
    c(sprintf(problem, python_version, own_version()), i = advice),
    class = "tfdist_warning_version"
  )
}

is_older <- function(version, than) {
  tryCatch(numeric_version(version) < numeric_version(than), error = function(error) TRUE)
}

# Call a function of pybackend. Its failures come back in an envelope, because reticulate drops the
# attributes of exceptions. Other exceptions arrive as conditions from reticulate, and Ctrl-C as an
# R interrupt. Python's progress and messages are shown by R. `!!!` splices a list of arguments.
call_python <- function(fn, ..., stops_workers = TRUE) {
  bridge <- pybackend()$bridge
  progress <- new_progress()
  outcome <- "failed"
  reason <- NULL
  on.exit(
    {
      progress("end")
      progress("close", list(outcome = outcome, text = reason))
      signal_kept_warnings()
    },
    add = TRUE
  )
  the$observer_error <- NULL
  answer <- withCallingHandlers(
    do.call(bridge$capture_shown, c(list(progress, fn), rlang::list2(...)), quote = TRUE),
    python.builtin.Exception = function(error) {
      if (!is.null(the$observer_error)) {
        rlang::cnd_signal(the$observer_error)
      }
      # Keras adds colours to its messages.
      abort_tfdist(cli::ansi_strip(conditionMessage(error)), "tfdist_error_python")
    },
    interrupt = function(interrupt) {
      outcome <<- if (stops_workers) "cancelled" else "left"
      if (stops_workers) {
        rlang::inform("Interrupted: the workers have been stopped.")
      }
    }
  )
  if (!isTRUE(answer$ok)) {
    reason <- answer$error$message
    abort_python(answer$error)
  }
  outcome <- "succeeded"
  answer$value
}

# The same for a function of bridge.py.
call_bridge <- function(name, ...) call_python(pybackend()$bridge[[name]], ...)

# The same in a separate process, for calls that must not start Python in this session.
call_python_apart <- function(name, arguments, named) {
  config <- find_pybackend()
  request <- list(call = name, arguments = arguments, named = named)
  program <- "import sys; from pybackend.bridge import answer; print(answer(sys.stdin.read()))"
  output <- suppressWarnings(system2(
    config$python,
    c("-c", shQuote(program)),
    input = jsonlite::toJSON(request, auto_unbox = TRUE, null = "null"),
    stdout = TRUE
  ))
  if (length(attr(output, "status"))) {
    abort_no_pybackend(config, "It failed with the error printed above.")
  }
  answer <- jsonlite::parse_json(output[[length(output)]])
  if (!isTRUE(answer$ok)) {
    abort_python(answer$error)
  }
  answer$value
}
