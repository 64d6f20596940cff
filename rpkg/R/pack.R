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
#'
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
