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

# A connection for the calling test file. Successive files share it until one needs another master,
# because a process has one Spark.
file_connection <- function(master, env = parent.frame()) {
  skip_if_no_spark()
  withr::local_envvar(
    SPARK_HOME = pyspark_home(),
    PYSPARK_PYTHON = reticulate::py_exe(),
    .local_envir = env
  )
  if (!identical(shared_connection$master, master) || !is_open(shared_connection$sc)) {
    end_shared_connection()
    # Spark writes its metastore to the directory in which it was started.
    folder <- withr::local_tempdir(.local_envir = testthat::teardown_env())
    config <- test_config()
    shared_connection$sc <- withr::with_dir(
      folder,
      sparklyr::spark_connect(master = master, config = config)
    )
    shared_connection$master <- master
    withr::defer(end_shared_connection(), envir = testthat::teardown_env())
  }
  shared_connection$sc
}

# Separate executors in `make test-full`, otherwise tasks in Spark's one process.
full_cluster <- function() if (runs_full()) "local-cluster[2,1,1024]" else "local[2]"

shared_connection <- new.env()

is_open <- function(sc) !is.null(sc) && sparklyr::connection_is_open(sc)

end_shared_connection <- function() {
  sc <- shared_connection$sc
  shared_connection$sc <- NULL
  if (is_open(sc)) {
    on.exit(sparklyr::spark_disconnect(sc))
    # Otherwise PySpark, which shares it, considers it running, and rejects a Connect session.
    session <- reticulate::import("pyspark.sql")$SparkSession$getActiveSession()
    if (!is.null(session)) {
      session$stop()
    }
  }
}

test_config <- function() {
  config <- sparklyr::spark_config()
  config[["sparklyr.shell.driver-memory"]] <- "1g"
  # Jars that a release of Spark needs for sparklyr's R workers; scripts/test-matrix.sh names them.
  jars <- Sys.getenv("TFDIST_TEST_CLASSPATH")
  if (nzchar(jars)) {
    config[["sparklyr.shell.driver-class-path"]] <- jars
    config[["spark.executor.extraClassPath"]] <- jars
  }
  config
}

# Below the ports of outgoing connections, which could take a port before it is used.
free_ports <- function(count) {
  socket <- reticulate::import("socket")
  is_free <- function(port) {
    tryCatch(
      {
        socket$create_server(reticulate::tuple("127.0.0.1", port))$close()
        TRUE
      },
      error = function(condition) FALSE
    )
  }
  found <- Filter(is_free, sample(20000:32000, 50L))
  if (length(found) < count) {
    stop("fewer than ", count, " of 50 ports were free")
  }
  found[seq_len(count)]
}

# The id of an ended process may exist for seconds, until the system's first process reaps it.
is_running <- function(pid) {
  if (!dir.exists("/proc/self")) {
    return(tools::pskill(pid, 0))
  }
  status <- file.path("/proc", pid, "status")
  lines <- tryCatch(suppressWarnings(readLines(status)), error = function(condition) character())
  length(lines) > 0L && !any(grepl("^State:\\s+Z", lines))
}

fit_weights <- function(fit) fit$model$get_weights()

skip_if_no_pysparklyr <- function() {
  skip_if_no_spark()
  # Only tests need it, so it is not in DESCRIPTION.
  if (!nzchar(system.file(package = "pysparklyr"))) {
    skip_or_fail("the R package pysparklyr is missing")
  }
}

# Address of a Spark Connect server with two slots for the calling test file.
file_connect_server <- function(env = parent.frame()) {
  home <- pyspark_home()
  # Spark writes its metastore to the directory in which it was started.
  folder <- withr::local_tempdir(.local_envir = env)
  log <- file.path(folder, "server.log")
  withr::local_envvar(
    SPARK_HOME = home,
    SPARK_LOCAL_IP = "127.0.0.1",
    SPARK_LOCAL_DIRS = folder,
    PYSPARK_PYTHON = reticulate::py_exe()
  )
  subprocess <- reticulate::import("subprocess")
  server <- subprocess$Popen(
    connect_command(home, folder),
    cwd = folder,
    env = as.list(Sys.getenv()),
    stdout = reticulate::import_builtins()$open(log, "wb"),
    stderr = subprocess$STDOUT
  )
  withr::defer(
    {
      server$terminate()
      server$wait(120)
    },
    envir = env
  )
  paste0("sc://", address_in_log(server, log))
}

connect_command <- function(home, folder) {
  c(
    file.path(home, "bin", "spark-submit"),
    c("--master", "local[2]", "--driver-memory", "1g"),
    c("--driver-java-options", paste0("-Djava.io.tmpdir=", folder)),
    c("--conf", "spark.connect.grpc.binding.address=127.0.0.1"),
    # The system chooses the port.
    c("--conf", "spark.connect.grpc.binding.port=0"),
    c("--conf", "spark.ui.enabled=false"),
    c("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
    "spark-internal"
  )
}

address_in_log <- function(server, log) {
  deadline <- Sys.time() + 200
  while (Sys.time() < deadline) {
    said <- readChar(log, file.size(log), useBytes = TRUE)
    # Only complete lines: the server may be writing one.
    found <- regmatches(said, regexec("server started at: ([^\n]+)\n", said, useBytes = TRUE))[[1L]]
    if (length(found)) {
      return(found[[2L]])
    }
    if (!is.null(server$poll())) {
      break
    }
    Sys.sleep(0.1)
  }
  stop("the Spark Connect server did not start:\n", said)
}

# A connection of pysparklyr, with the running Python, for the calling test file.
file_pyspark_connection <- function(env = parent.frame()) {
  skip_if_no_pysparklyr()
  end_shared_connection()
  sc <- suppressMessages(sparklyr::spark_connect(
    master = file_connect_server(env),
    method = "spark_connect",
    version = reticulate::import("pyspark")$`__version__`,
    envname = dirname(dirname(reticulate::py_exe()))
  ))
  withr::defer(end_pyspark_connection(sc), envir = env)
  sc
}

end_pyspark_connection <- function(sc) {
  session <- sparklyr::spark_session(sc)
  if (!session$is_stopped) {
    session$stop()
  }
  # sparklyr does not close the session of pysparklyr.
  sparklyr::spark_disconnect(sc)
  # With this variable PySpark allows only Connect sessions in its process.
  reticulate::py_run_string("import os; os.environ.pop('SPARK_CONNECT_MODE_ENABLED', None)")
}

# Expect evaluation and prediction on the cluster to equal this session's, without remaining views.
expect_scored_as_here <- function(sc, session, fit, table, rows, before) {
  on_table <- barrier_evaluate(sc, fit, table)
  alone <- evaluate_here(fit$model, list(as.matrix(rows[1:4]), rows$label))
  expect_equal(on_table[names(alone)], alone, tolerance = 1e-5)
  expect_equal(barrier_predict(sc, fit, rows), predict(fit, rows), tolerance = 1e-5)
  expect_false(any(grepl("^tfdist_", setdiff(list_views(session), before))))
}

list_views <- function(session) {
  vapply(session$catalog$listTables(), function(view) view$name, "")
}
