#' Install the Python half
#'
#' Creates a virtual environment and installs the Python package of the same version, with
#' TensorFlow, into it. tfdist finds the environment `r-tfdist` on its own.
#'
#' @param source Where the Python package comes from: `NULL` uses the wheel inside this R package,
#'   or the package index if there is none; otherwise the path of a wheel (`.whl`) or of a checkout,
#'   a directory with `pyproject.toml`.
#' @param envname Name or path of the virtual environment. It is created if it does not exist.
#' @param extras Optional parts to install: `"cpu"` or `"cuda"` for TensorFlow, `"spark"` for
#'   PySpark, and `"r"` for rpy2, with which Python workers run R functions (see [barrier_apply()]).
#' @param python Path or version of the Python to create the environment with; `NULL` lets
#'   reticulate choose. It must be Python 3.10 or later.
#' @param ... Further arguments for [reticulate::virtualenv_install()], such as `pip_options`.
#'
#' @return The path of the environment, invisibly.
#' @export
#' @examples
#' \dontrun{
#' install_tfdist()
#' install_tfdist(extras = c("cpu", "spark"))
#' install_tfdist("~/src/tfdist")
#' }
install_tfdist <- function(
  source = NULL,
  envname = "r-tfdist",
  extras = "cpu",
  python = NULL,
  ...
) {
  check_source(source)
  check_string(envname)
  check_strings(extras, allow_null = TRUE)
  check_string(python, allow_null = TRUE)
  requirement <- python_requirement(source, extras)
  if (!reticulate::virtualenv_exists(envname)) {
    create_environment(envname, python)
  }
  reticulate::virtualenv_install(envname, packages = requirement, ...)
  path <- dirname(dirname(reticulate::virtualenv_python(envname)))
  inform_installed(envname, path)
  invisible(path)
}

create_environment <- function(envname, python) {
  arguments <- list(envname, packages = NULL)
  # NULL is not the default of reticulate.
  if (!is.null(python)) {
    arguments$python <- python
  } else {
    arguments$version <- ">=3.10"
  }
  do.call(reticulate::virtualenv_create, arguments)
}

inform_installed <- function(envname, path) {
  next_steps <- c(
    v = sprintf("Installed the Python half of tfdist %s in %s.", own_version(), path)
  )
  if (!identical(envname, "r-tfdist")) {
    python <- reticulate::virtualenv_python(envname)
    next_steps <- c(
      next_steps,
      i = sprintf("Before `library(tfdist)`: `Sys.setenv(RETICULATE_PYTHON = \"%s\")`.", python)
    )
  }
  if (reticulate::py_available()) {
    next_steps <- c(next_steps, i = "Restart R: this session is already running another Python.")
  }
  rlang::inform(c(next_steps, i = "Try it: `tfdist::train_mnist(\"local\", workers = 2)`."))
}

check_source <- function(source, arg = caller_arg(source), call = caller_env()) {
  check_string(source, allow_null = TRUE, arg = arg, call = call)
  if (is.null(source)) {
    return(invisible())
  }
  is_wheel <- grepl("\\.whl$", source) && file.exists(source)
  is_checkout <- file.exists(file.path(source, "pyproject.toml"))
  if (!is_wheel && !is_checkout) {
    problem <- if (file.exists(source)) {
      "is neither a wheel (.whl) nor a directory with pyproject.toml"
    } else {
      "does not exist"
    }
    abort_input(
      c(
        sprintf("`%s` %s: %s.", arg, problem, source),
        i = "Leave it out to install the wheel inside the R package."
      ),
      call = call
    )
  }
}

# What pip is asked to install.
python_requirement <- function(source, extras) {
  wanted <- if (length(extras)) sprintf("[%s]", paste(extras, collapse = ",")) else ""
  source <- source %||% bundled_wheel()
  if (is.null(source)) {
    return(sprintf("tfdist%s==%s", wanted, own_version()))
  }
  paste0(normalizePath(source), wanted)
}

bundled_wheel <- function() {
  directory <- system.file("python", package = "tfdist")
  pattern <- sprintf("^tfdist-%s-.*\\.whl$", gsub(".", "\\.", own_version(), fixed = TRUE))
  wheels <- if (nzchar(directory)) list.files(directory, pattern, full.names = TRUE)
  if (length(wheels)) wheels[[1L]]
}
