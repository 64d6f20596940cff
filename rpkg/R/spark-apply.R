# Workers started by sparklyr: spark_apply(barrier = TRUE) runs R on the executors.

# In place of the session, for calls of Python that are to run a function of R. Where the route is
# not sparklyr's own, Python starts the workers and R runs in them by rpy2.
open_r_workers <- function(route, call = caller_env()) {
  session <- open_session(route, call)
  if (route$kind != "sparklyr") {
    return(session)
  }
  backend <- pybackend(call)
  sc <- route$sc
  python <- executor_python(the$applications[[application_id(sc)]])
  backend$bridge$SparklyrWorkers(
    session,
    function(view, archive, group, cores) run_stage(sc, view, archive, group, cores, python),
    function(view, driver, group) as.list(examine_executors(sc, view, driver, group, python))
  )
}

# Runs the stage to its end. The rows of the view are what the workers get.
run_stage <- function(sc, view, archive, group, cores, python) {
  told <- list(
    archive = readBin(archive, "raw", file.size(archive)),
    cores = cores,
    library_paths = .libPaths(),
    python = python
  )
  applied(sc, view, group, spark_apply_worker, list(rank = "integer"), told, barrier = TRUE)
  invisible()
}

# What `worker` returns for the partitions of a view, as a data frame. Nothing stays in Spark.
applied <- function(sc, view, group, worker, columns, told, ...) {
  context <- sparklyr::spark_context(sc)
  own <- c("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
  before <- lapply(own, function(name) sparklyr::invoke(context, "getLocalProperty", name))
  on.exit(
    Map(
      function(name, value) sparklyr::invoke(context, "setLocalProperty", name, value),
      own,
      before
    ),
    add = TRUE
  )
  sparklyr::invoke(context, "setJobGroup", group, "tfdist training", TRUE)
  environment(worker) <- globalenv()
  # Of a table spark_apply() would make another, and leave it behind; of a DataFrame it makes one.
  stage <- sparklyr::spark_apply(
    sparklyr::invoke(sparklyr::spark_session(sc), "table", view),
    worker,
    columns = columns,
    context = told,
    packages = FALSE,
    memory = FALSE,
    ...
  )
  sparklyr::sdf_collect(stage)
}

# What the executors lack, where a stage failed before its workers could say it.
examine_executors <- function(sc, view, driver, group, python) {
  told <- list(driver = driver, python = python, library_paths = .libPaths())
  found <- applied(sc, view, group, spark_examine_worker, list(problem = "character"), told)
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
    said <- suppressWarnings(tryCatch(
      system2(context$python, arguments, stdout = TRUE, stderr = TRUE, timeout = 30),
      error = function(error) structure("", status = 127L)
    ))
    status <- attr(said, "status")
    if (identical(as.integer(status), 127L)) {
      paste("there is no Python at", context$python)
    } else if (length(status)) {
      paste0(context$python, ": ", utils::tail(said, 1L))
    }
  }
  lacking <- ask("import cloudpickle, h5py, numpy, pyarrow")
  connect <- paste(
    "import socket, sys; host, _, port = sys.argv[1].rpartition(':');",
    "socket.create_connection((host.strip('[]'), int(port)), timeout=5)"
  )
  unreached <- if (is.null(lacking)) ask(connect, context$driver)
  if (!is.null(unreached)) {
    unreached <- sprintf("it cannot reach the driver at %s (%s)", context$driver, unreached)
  }
  problems <- c(problems, lacking, unreached)
  if (length(problems) == 0L) {
    return(data.frame(problem = character()))
  }
  where <- paste0("on ", Sys.info()[["nodename"]], ": ")
  data.frame(problem = paste0(where, paste(problems, collapse = ", and ")))
}

# Runs in sparklyr's R on an executor, which may have no package but those of R itself.
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
    "from pybackend.launchers.spark.sparklyr_task import main; main(*sys.argv[1:])"
  )
  status <- suppressWarnings(system2(
    context$python,
    c("-c", shQuote(start), shQuote(archive), shQuote(rows), shQuote(options)),
    stdout = log,
    stderr = log
  ))
  if (!identical(as.integer(status), 0L)) {
    said <- if (file.exists(log)) utils::tail(readLines(log, warn = FALSE), 20L)
    if (identical(as.integer(status), 127L)) {
      said <- paste("there is no Python at", context$python)
    }
    stop(
      "worker ",
      barrier$partition,
      " on ",
      Sys.info()[["nodename"]],
      ": ",
      paste(said, collapse = " | "),
      call. = FALSE
    )
  }
  data.frame(rank = as.integer(barrier$partition))
}
