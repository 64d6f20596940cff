skip_if_no_spark <- function() {
  skip_if_no_pybackend()
  if (!requireNamespace("sparklyr", quietly = TRUE)) {
    skip_or_fail("the R package sparklyr is missing")
  }
  if (is.null(find_java())) {
    skip_or_fail("java is missing")
  }
  if (is.null(pyspark_home())) {
    skip_or_fail("pyspark is missing")
  }
}

pyspark_home <- function() {
  spec <- reticulate::import("importlib.util")$find_spec("pyspark")
  if (!is.null(spec)) dirname(spec$origin)
}

# A connection for the test file that calls it, closed at the end of the file.
file_connection <- function(master, env = parent.frame()) {
  skip_if_no_spark()
  withr::local_envvar(
    SPARK_HOME = pyspark_home(),
    PYSPARK_PYTHON = reticulate::py_exe(),
    .local_envir = env
  )
  config <- sparklyr::spark_config()
  config[["sparklyr.shell.driver-memory"]] <- "1g"
  # Spark leaves its metastore where it was started.
  folder <- withr::local_tempdir(.local_envir = env)
  sc <- withr::with_dir(folder, sparklyr::spark_connect(master = master, config = config))
  withr::defer(sparklyr::spark_disconnect(sc), envir = env)
  sc
}

fit_weights <- function(fit) fit$model$get_weights()
