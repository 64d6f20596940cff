#' Install the Python package of tfdist
#'
#' Creates a virtual environment and installs TensorFlow and the matching version of the Python
#' package into it. tfdist finds the `r-tfdist` environment automatically. The output of pip goes to
#' a log, which is shown only if pip fails.
#'
#' @section Versions:
#' The newest Python from 3.11 to 3.13 on this machine is used, because TensorFlow has no releases
#' for other versions. `extras = "spark"` installs a PySpark version below 4.3, because sparklyr's
#' workers need an additional jar with later versions. If your cluster runs a different version of
#' Spark, specify it in `pip_options`, for example `"pyspark==3.5.8"`.
#' @section Spark for sparklyr:
#' PySpark contains a complete Spark installation. For `sparklyr::spark_connect(master = "local")`
#' to use it, you must set `SPARK_HOME` to the folder of that installation. The installer prints
#' this path at the end, and [tfdist_sitrep()] returns it:
#' `Sys.setenv(SPARK_HOME = tfdist_sitrep(quiet = TRUE)$spark_home)`. If you install Spark with
#' `sparklyr::spark_install()`, sparklyr finds it without `SPARK_HOME`.
#' @param source Source of the Python package. `NULL` (default): the copy inside this R package.
#'   Otherwise, the path to a wheel (`.whl`) or to a checkout (a directory with `pyproject.toml`).
#' @param envname Name or path of the virtual environment. It is created if it does not exist.
#' @param extras Optional parts to install: `"cpu"` or `"cuda"` for TensorFlow, `"spark"` for
#'   PySpark, `"mlflow"` or `"wandb"` for [track_mlflow()], and `"r"` for rpy2, in a version that
#'   works with your version of R. Python workers need rpy2 to run R functions (see
#'   [barrier_apply()]).
#' @param python Python interpreter to create the environment with, as a path or a version from 3.11
#'   to 3.13. `NULL` (default): the newest of these versions that is found.
#' @param pip_options Additional command-line arguments for `pip install`: options or requirements.
#' @return The path to the environment, invisibly.
#' @export
#' @examples
#' \dontrun{
#' install_tfdist()
#' install_tfdist(extras = c("cpu", "spark"))
#' install_tfdist("~/src/tfdist", python = "3.12")
#' }
install_tfdist <- function(
  source = NULL,
  envname = "r-tfdist",
  extras = "cpu",
  python = NULL,
  pip_options = NULL
) {
  check_source(source)
  check_string(envname)
  check_strings(extras, allow_null = TRUE)
  check_string(python, allow_null = TRUE)
  check_strings(pip_options, allow_null = TRUE)
  requirements <- python_requirements(source, extras)
  if (!reticulate::virtualenv_exists(envname)) {
    # First: if create_environment() fails, it removes the folder.
    python <- find_python(python)
    create_environment(envname, python)
  }
  path <- dirname(dirname(reticulate::virtualenv_python(envname)))
  run_pip(path, requirements, pip_options)
  inform_installed(envname, path, extras)
  invisible(path)
}

inform_installed <- function(envname, path, extras) {
  setting <- "Before `%s`: `Sys.setenv(%s = \"%s\")`."
  spark <- Sys.glob(file.path(path, "lib", "python*", "site-packages", "pyspark"))
  needs_home <- "spark" %in% extras && length(spark) && !nzchar(Sys.getenv("SPARK_HOME"))
  rlang::inform(c(
    v = sprintf("Installed the Python package of tfdist %s in %s.", own_version(), path),
    i = if (!identical(envname, "r-tfdist")) {
      python <- reticulate::virtualenv_python(envname)
      sprintf(setting, "library(tfdist)", "RETICULATE_PYTHON", python)
    },
    i = if (needs_home) {
      sprintf(setting, "sparklyr::spark_connect()", "SPARK_HOME", spark[[1L]])
    },
    i = if (reticulate::py_available()) {
      "Restart R: this session is already running another Python."
    },
    i = sprintf("In a shell, the command `tfdist` is %s.", file.path(path, "bin", "tfdist")),
    i = "Try it: `tfdist::train_mnist(\"local\", workers = 2)`."
  ))
}

check_source <- function(source, arg = caller_arg(source)) {
  check_string(source, allow_null = TRUE, arg = arg)
  is_wheel <- function() grepl("\\.whl$", source) && file.exists(source)
  is_checkout <- function() file.exists(file.path(source, "pyproject.toml"))
  if (!is.null(source) && !is_wheel() && !is_checkout()) {
    problem <- if (file.exists(source)) {
      "is neither a wheel (.whl) nor a directory with pyproject.toml"
    } else {
      "does not exist"
    }
    problem <- sprintf("`%s` %s: %s.", arg, problem, source)
    abort_input(problem, i = "Leave it out to install the copy inside the R package.")
  }
}

# Sparklyr's R workers fail under pyspark 4.3, which lacks a class of protobuf.
spark_bound <- "pyspark<4.3"

# Requirements for pip.
python_requirements <- function(source, extras, r = getRversion()) {
  source <- source %||% bundled_python() %||% abort_no_source()
  # The newest rpy2 calls a function that R has since 4.5; the extra r44 installs an older rpy2.
  extras[extras == "r" & r < "4.5"] <- "r44"
  wanted <- if (length(extras)) sprintf("[%s]", paste(extras, collapse = ",")) else ""
  c(paste0(normalizePath(source), wanted), if ("spark" %in% extras) spark_bound)
}

# Path of the wheel in a released package, or of the sources that an installation from a checkout
# copied; NULL if there is neither.
bundled_python <- function(directory = system.file("python", package = "tfdist")) {
  pattern <- sprintf("^tfdist-%s-.*\\.whl$", gsub(".", "\\.", own_version(), fixed = TRUE))
  wheels <- if (nzchar(directory)) list.files(directory, pattern, full.names = TRUE)
  parts <- file.path(directory, c("pyproject.toml", file.path("pybackend", "__init__.py")))
  if (length(wheels)) {
    wheels[[1L]]
  } else if (all(file.exists(parts))) {
    directory
  }
}

abort_no_source <- function() {
  abort_input(
    "This installation of the R package does not contain the Python package.",
    i = "There are three ways to get it:",
    "*" = "Install the released R package, a file tfdist_<version>.tar.gz, which contains it.",
    "*" = paste(
      "Install `rpkg` from a git clone of the repository, which has its symbolic links:",
      "`R CMD INSTALL path/to/tfdist/rpkg`."
    ),
    "*" = "Name a wheel or a checkout: `install_tfdist(\"path/to/tfdist\")`."
  )
}
