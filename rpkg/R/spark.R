# Check where the workers will run. Nothing is started here, so a wrong `sc` is reported at once.
check_sc <- function(sc, arg = caller_arg(sc)) {
  if (is.null(sc) || is_local(sc)) {
    return(list(kind = "local", sc = sc))
  }
  if (inherits(sc, "tfdist_launcher")) {
    return(list(kind = "launcher", sc = sc))
  }
  if (is_python(sc) && any(grepl("^pyspark\\..*SparkSession$", class(sc)))) {
    return(list(kind = "python", sc = sc))
  }
  if (!inherits(sc, "spark_connection")) {
    abort_sc(sc, arg)
  }
  # A connection of pysparklyr has both classes.
  kind <- if (inherits(sc, "pyspark_connection")) "pysparklyr" else "sparklyr"
  check_open_connection(sc, kind, arg)
  if (kind == "sparklyr" && inherits(sc, "livy_connection")) {
    abort_input(
      sprintf("`%s` is a Livy connection, whose Spark runs where Python cannot attach to it.", arg),
      i = "Connect with `spark_connect()` to YARN, Kubernetes, a standalone master or Databricks."
    )
  }
  list(kind = kind, sc = sc)
}

has_spark <- function(route) !route$kind %in% c("local", "launcher")

place_without_spark <- function(route) {
  if (route$kind == "local") "this machine without Spark" else "a launcher without Spark"
}

is_local <- function(sc) {
  rlang::is_string(sc) && grepl("^local(\\[([0-9]+|\\*)\\])?$", sc)
}

check_open_connection <- function(sc, kind, arg) {
  check_installed("sparklyr", "A Spark connection")
  is_open <- if (kind == "pysparklyr") {
    # sparklyr considers every connection of pysparklyr open; only the session knows.
    !is_stopped(pysparklyr_session(sc))
  } else {
    sparklyr::spark_connection_is_open(sc)
  }
  if (!is_open) {
    problem <- sprintf("The Spark connection `%s` is closed.", arg)
    problem <- c(problem, i = "Connect again with `sparklyr::spark_connect()`.")
    abort_tfdist(problem, "tfdist_error_cluster")
  }
}

# In the connection of a pysparklyr table, its DataFrame takes the place of the session.
pysparklyr_session <- function(sc) {
  session <- sparklyr::spark_session(sc)
  if (is_spark_frame(session)) session$sparkSession else session
}

is_stopped <- function(session) {
  reticulate::py_has_attr(session, "is_stopped") && isTRUE(session$is_stopped)
}

abort_sc <- function(sc, arg) {
  abort_input(
    sprintf("`%s` does not specify where the workers run: it is %s.", arg, describe(sc)),
    i = "It can be:",
    "*" = "`\"local\"`: worker processes on this machine, without Spark;",
    "*" = "`NULL`: this machine, or all sessions that join (`join_workers()`);",
    "*" = "a connection from `sparklyr::spark_connect()`;",
    "*" = "a PySpark `SparkSession`, held by reticulate;",
    "*" = "the result of `hosts()` (machines over ssh), `slurm()` or `kubernetes()`."
  )
}

# A checked route for Python: a PySpark session, a launcher, or NULL for this machine.
open_session <- function(route) {
  switch(
    route$kind,
    local = open_place(route$sc),
    python = route$sc,
    launcher = as_python_options(route$sc),
    pysparklyr = pysparklyr_session(route$sc),
    sparklyr = attach_session(route$sc)
  )
}

# sparklyr and PySpark share one JVM: a Py4J gateway is started in sparklyr's, and PySpark connects
# to it instead of starting another Spark. Both sides then see the same tables and views.
attach_session <- function(sc) {
  application <- application_id(sc)
  # Stored even if another application is attached now: a gateway exists as long as its JVM.
  if (is.null(the$applications[[application]])) {
    the$applications[[application]] <- start_gateway(sc, sparklyr::spark_context(sc))
  }
  gateway <- the$applications[[application]]
  call_bridge(
    "attach_spark",
    port = gateway$port,
    secret = gateway$secret,
    spark_home = spark_home(sc),
    python = executor_python(gateway)
  )
}

application_id <- function(sc) sparklyr::invoke(sparklyr::spark_context(sc), "applicationId")

start_gateway <- function(sc, context) {
  conf <- sparklyr::invoke(context, "getConf")
  server <- sparklyr::invoke_new(sc, "org.apache.spark.api.python.Py4JServer", conf)
  sparklyr::invoke(server, "start")
  list(
    port = as.integer(sparklyr::invoke(server, "getListeningPort")),
    secret = sparklyr::invoke(server, "secret"),
    python = sparklyr::invoke(conf, "get", "spark.pyspark.python", ""),
    # Prevents sparklyr from releasing the server in the JVM.
    server = server
  )
}

spark_home <- function(sc) {
  home <- sc$spark_home %||% Sys.getenv("SPARK_HOME")
  if (nzchar(home)) home
}

executor_python <- function(gateway) {
  for (python in c(Sys.getenv("PYSPARK_PYTHON"), gateway$python)) {
    if (nzchar(python)) {
      return(python)
    }
  }
  reticulate::py_exe()
}

# A sparklyr table as a PySpark DataFrame, through a temporary view with a unique name.
with_spark_frame <- function(table, session, code) {
  name <- paste0("tfdist_", random_hex())
  sparklyr::sdf_register(table, name)
  on.exit(session$catalog$dropTempView(name), add = TRUE)
  code(session$table(name))
}

# A PySpark DataFrame as a lazy table: a view that exists as long as the connection, because a lazy
# table reads it repeatedly.
show_spark_frame <- function(frame, sc, kind) {
  name <- paste0("tfdist_", kind, "_", random_hex())
  frame$createOrReplaceTempView(name)
  dplyr::tbl(sc, name)
}

# Not from R's random numbers: that would advance R's seed, and equal seeds would give equal names.
random_hex <- function() {
  basename(tempfile(sprintf("%d_", Sys.getpid())))
}
