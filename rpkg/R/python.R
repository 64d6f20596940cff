is_python <- function(x) inherits(x, "python.builtin.object")

# The Python module, imported when it is first needed.
pybackend <- function(call = caller_env()) {
  if (is.null(the$pybackend)) {
    the$pybackend <- load_pybackend(call)
    warn_other_version(the$pybackend$`__version__`)
  }
  the$pybackend
}

load_pybackend <- function(call = caller_env()) {
  # Once Python runs, its installation cannot be changed in this session. So look first, and leave
  # the session free for install_tfdist() where pybackend is absent.
  if (!reticulate::py_available()) {
    local_no_managed_python()
    config <- discover_python()
    if (is.null(config$required_module_path)) {
      abort_no_pybackend(config, if (!is.null(config$python)) "It has no module pybackend.", call)
    }
  }
  tryCatch(
    {
      reticulate::import("pybackend.bridge")
      reticulate::import("pybackend")
    },
    error = function(error) {
      # reticulate's second line tells how to see the traceback.
      reason <- sub("\nRun `reticulate::.*", "", cli::ansi_strip(conditionMessage(error)))
      abort_no_pybackend(running_python(), reason, call)
    }
  )
}

# reticulate would otherwise download a Python of its own, which has no pybackend, where it finds
# none that was set up. A session that asked it for tfdist gets what it asked for.
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

# What reticulate would choose, without starting it; `problem` where it finds none.
discover_python <- function() {
  local_no_managed_python()
  tryCatch(
    reticulate::py_discover_config("pybackend", use_environment = "r-tfdist"),
    error = function(error) list(problem = conditionMessage(error))
  )
}

running_python <- function() {
  if (reticulate::py_available()) reticulate::py_config() else discover_python()
}

has_pybackend <- function() is.null(pybackend_problem())

# Why pybackend cannot be used; NULL where it can. Starts Python only where it is there.
pybackend_problem <- function() {
  if (is.null(the$pybackend) && !reticulate::py_available()) {
    config <- discover_python()
    if (is.null(config$required_module_path)) {
      return(config$problem %||% "It has no module pybackend.")
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
    sprintf("of the virtual environment %s", config$virtualenv)
  } else {
    "the first on the search path"
  }
}

abort_no_pybackend <- function(config, reason, call) {
  again <- if (reticulate::py_available()) ", then restart R" else ""
  abort_tfdist(
    c(
      "The Python package pybackend, which does the training, cannot be imported.",
      x = sprintf("Python: %s.", describe_python(config)),
      x = reason,
      i = sprintf("Run `tfdist::install_tfdist()`%s.", again),
      i = "`tfdist::tfdist_sitrep()` shows all that was found."
    ),
    "tfdist_error_python",
    reason = reason,
    call = call
  )
}

own_version <- function() getNamespaceVersion("tfdist")[["version"]]

warn_other_version <- function(python_version) {
  if (identical(python_version, own_version())) {
    return(invisible())
  }
  older <- is_older(python_version, own_version())
  mend <- if (older) {
    "Run `tfdist::install_tfdist()`, then restart R."
  } else {
    "Install the R package of the same version as the Python package."
  }
  rlang::warn(
    c(
      sprintf(
        "The Python package is version %s and the R package %s; they must be the same.",
        python_version,
        own_version()
      ),
      i = mend
    ),
    class = "tfdist_warning_version"
  )
}

is_older <- function(version, than) {
  tryCatch(numeric_version(version) < numeric_version(than), error = function(error) TRUE)
}

# Calls a function of pybackend. Its failures come back in an envelope, because an exception loses
# its attributes on the way through reticulate. Other exceptions come as conditions of reticulate,
# and Ctrl-C as an interrupt of R.
call_python <- function(fn, ..., call = caller_env()) {
  bridge <- pybackend(call)$bridge
  answer <- withCallingHandlers(
    bridge$capture(fn, ...),
    python.builtin.Exception = function(error) {
      # Keras colours its messages.
      message <- cli::ansi_strip(conditionMessage(error))
      abort_tfdist(message, "tfdist_error_python", call = call)
    },
    interrupt = function(interrupt) {
      rlang::inform("Interrupted: the workers have been stopped.")
    }
  )
  if (!isTRUE(answer$ok)) {
    abort_python(answer$error, call)
  }
  answer$value
}

# The same in a process of its own, for what must not start Python in this session.
call_python_apart <- function(name, arguments, named, call = caller_env()) {
  config <- discover_python()
  if (is.null(config$required_module_path)) {
    abort_no_pybackend(config, if (!is.null(config$python)) "It has no module pybackend.", call)
  }
  asked <- list(call = name, arguments = arguments, named = named)
  program <- "import sys; from pybackend.bridge import answer; print(answer(sys.stdin.read()))"
  said <- suppressWarnings(system2(
    config$python,
    c("-c", shQuote(program)),
    input = jsonlite::toJSON(asked, auto_unbox = TRUE, null = "null"),
    stdout = TRUE
  ))
  if (length(attr(said, "status"))) {
    abort_no_pybackend(config, "It ends with an error, which it has printed.", call)
  }
  answer <- jsonlite::parse_json(said[[length(said)]])
  if (!isTRUE(answer$ok)) {
    abort_python(answer$error, call)
  }
  answer$value
}
