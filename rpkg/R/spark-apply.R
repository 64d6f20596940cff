# Workers that sparklyr starts: spark_apply(barrier = TRUE) runs R on the executors.

# Replaces the session in calls that run an R function. Unless `sc` is a connection of sparklyr
# itself, Python starts the workers and rpy2 runs R in them.
open_r_workers <- function(route) {
  session <- open_session(route)
  if (route$kind != "sparklyr") {
    return(session)
  }
  sc <- route$sc
  python <- executor_python(the$applications[[application_id(sc)]])
  pybackend()$bridge$SparklyrWorkers(
    session,
    function(view, archive, group, cores) run_workers(sc, view, archive, group, cores, python),
    function(view, driver, group) as.list(examine_executors(sc, view, driver, group, python))
  )
}

# Run the workers until they end. They get the rows of the view.
run_workers <- function(sc, view, archive, group, cores, python) {
  context <- list(
    archive = readBin(archive, "raw", file.size(archive)),
    cores = cores,
    library_paths = .libPaths(),
    python = python
  )
  columns <- list(rank = "integer")
  apply_to_view(sc, view, group, spark_apply_worker, columns, context, barrier = TRUE)
  invisible()
}

# Returns what `worker` returns for the partitions of a view, as a data frame. Leaves nothing in
# Spark.
apply_to_view <- function(sc, view, group, worker, columns, context, ...) {
  spark <- sparklyr::spark_context(sc)
  properties <- c("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
  before <- lapply(properties, function(name) sparklyr::invoke(spark, "getLocalProperty", name))
  restore <- function(name, value) sparklyr::invoke(spark, "setLocalProperty", name, value)
  on.exit(Map(restore, properties, before), add = TRUE)
  sparklyr::invoke(spark, "setJobGroup", group, "tfdist training", TRUE)
  environment(worker) <- globalenv()
  # Given a table, spark_apply() would create another one and leave it behind; so give a DataFrame.
  stage <- sparklyr::spark_apply(
    sparklyr::invoke(sparklyr::spark_session(sc), "table", view),
    worker,
    columns = columns,
    context = context,
    packages = FALSE,
    memory = FALSE,
    ...
  )
  sparklyr::sdf_collect(stage)
}

# Find what is missing on the executors, after workers failed too early to report it.
examine_executors <- function(sc, view, driver, group, python) {
  context <- list(driver = driver, python = python, library_paths = .libPaths())
  columns <- list(problem = "character")
  found <- apply_to_view(sc, view, group, spark_examine_worker, columns, context)
  unique(found$problem)
}

spark_examine_worker <- function(df, context) {
  problems <- character()
  paths <- unlist(context$library_paths)
  .libPaths(unique(c(paths[dir.exists(paths)], .libPaths())))
  if (!requireNamespace("reticulate", quietly = TRUE)) {
    problems <- c(problems, "the R package reticulate is not installed")
  }
  ask <- function(program, ...) {
    arguments <- c("-c", shQuote(program), shQuote(c(...)))
    output <- suppressWarnings(tryCatch(
      system2(context$python, arguments, stdout = TRUE, stderr = TRUE, timeout = 30),
      error = function(error) structure("", status = 127L)
    ))
    status <- attr(output, "status")
    if (identical(as.integer(status), 127L)) {
      paste("there is no Python at", context$python)
    } else if (length(status)) {
      paste0(context$python, ": ", utils::tail(output, 1L))
    }
  }
  missing_packages <- ask("import cloudpickle, h5py, numpy, pyarrow")
  connect <- paste(
    "import socket, sys; host, _, port = sys.argv[1].rpartition(':');",
    "socket.create_connection((host.strip('[]'), int(port)), timeout=5)"
  )
  unreached <- if (is.null(missing_packages)) ask(connect, context$driver)
  if (!is.null(unreached)) {
    unreached <- sprintf("it cannot reach the driver at %s (%s)", context$driver, unreached)
  }
  problems <- paste(c(problems, missing_packages, unreached), collapse = ", and ")
  problems <- problems[nzchar(problems)]
  data.frame(problem = sprintf("on %s: %s", Sys.info()[["nodename"]], problems))
}

# Runs in sparklyr's R on an executor, which may have no packages beyond those that come with R.
spark_apply_worker <- function(df, context, barrier) {
  folder <- tempfile("tfdist-")
  dir.create(folder, mode = "0700")
  on.exit(unlink(folder, recursive = TRUE))
  archive <- file.path(folder, "task.zip")
  rows <- file.path(folder, "rows")
  log <- file.path(folder, "log")
  writeBin(context$archive, archive)
  writeLines(as.character(df[[1L]]), rows)

  paths <- unlist(context$library_paths)
  paths <- unique(c(paths[dir.exists(paths)], .libPaths()))
  Sys.setenv(R_LIBS = paste(paths, collapse = .Platform$path.sep))
  options <- sprintf(
    "{\"rank\": %d, \"cores\": %d, \"rscript\": \"%s\", \"addresses\": [%s]}",
    as.integer(barrier$partition),
    as.integer(context$cores),
    file.path(R.home("bin"), "Rscript"),
    paste0("\"", unlist(barrier$address), "\"", collapse = ", ")
  )
  start <- paste(
    "import sys; sys.path[0] = sys.argv[1];",
    "from pybackend.core.launchers.spark.barrier_task import run_from_r; run_from_r(*sys.argv[1:])"
  )
  status <- suppressWarnings(system2(
    context$python,
    c("-c", shQuote(start), shQuote(archive), shQuote(rows), shQuote(options)),
    stdout = log,
    stderr = log
  ))
  if (!identical(as.integer(status), 0L)) {
    output <- if (file.exists(log)) utils::tail(readLines(log, warn = FALSE), 20L)
    if (identical(as.integer(status), 127L)) {
      output <- paste("there is no Python at", context$python)
    }
    where <- paste("worker", barrier$partition, "on", Sys.info()[["nodename"]])
    stop(where, ": ", paste(output, collapse = " | "), call. = FALSE)
  }
  data.frame(rank = as.integer(barrier$partition))
}
