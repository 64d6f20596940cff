# Workers started by sparklyr: spark_apply(barrier = TRUE) runs R on the executors.

# In place of the session, for calls of Python that are to run a function of R. Where the route is
# not sparklyr's own, Python starts the workers and R runs in them by rpy2.
open_r_workers <- function(route, call = caller_env()) {
  session <- open_session(route, call)
  if (route$kind != "sparklyr") {
    return(session)
  }
  gateway <- the$applications[[1L]]
  backend <- pybackend(call)
  python <- executor_python(gateway)
  backend$bridge$SparklyrWorkers(
    session,
    function(view, archive, group, cores) {
      run_stage(route$sc, view, archive, group, cores, python)
    },
    function(workers, driver) as.list(examine_executors(route$sc, workers, driver, python))
  )
}

# Runs the stage to its end. The rows of the view are what the workers get.
run_stage <- function(sc, view, archive, group, cores, python) {
  context <- sparklyr::spark_context(sc)
  sparklyr::invoke(context, "setJobGroup", group, "tfdist training", TRUE)
  on.exit(sparklyr::invoke(context, "clearJobGroup"), add = TRUE)
  told <- list(
    archive = readBin(archive, "raw", file.size(archive)),
    cores = cores,
    library_paths = .libPaths(),
    python = python
  )
  worker <- spark_apply_worker
  environment(worker) <- globalenv()
  # Of a table spark_apply() would make another, and leave it behind; of a DataFrame it makes one.
  stage <- sparklyr::spark_apply(
    sparklyr::invoke(sparklyr::spark_session(sc), "table", view),
    worker,
    columns = c(rank = "integer"),
    context = told,
    packages = FALSE,
    barrier = TRUE
  )
  sparklyr::sdf_collect(stage)
  invisible()
}

# What the executors lack, where a stage failed before its workers could say it.
examine_executors <- function(sc, workers, driver, python) {
  examine <- spark_examine_worker
  environment(examine) <- globalenv()
  found <- sparklyr::spark_apply(
    sparklyr::sdf_len(sc, workers, repartition = workers),
    examine,
    columns = c(problem = "character"),
    context = list(driver = driver, python = python, library_paths = .libPaths()),
    packages = FALSE
  )
  unique(sparklyr::sdf_collect(found)$problem)
}

spark_examine_worker <- function(df, context) {
  problems <- character()
  paths <- unlist(context$library_paths)
  .libPaths(unique(c(paths[dir.exists(paths)], .libPaths())))
  if (!requireNamespace("reticulate", quietly = TRUE)) {
    problems <- c(problems, "the R package reticulate is not installed")
  }
  imports <- "import cloudpickle, h5py, numpy, pyarrow"
  said <- suppressWarnings(tryCatch(
    system2(context$python, c("-c", shQuote(imports)), stdout = TRUE, stderr = TRUE),
    error = function(error) structure("", status = 127L)
  ))
  status <- attr(said, "status")
  if (identical(as.integer(status), 127L)) {
    problems <- c(problems, paste("there is no Python at", context$python))
  } else if (length(status)) {
    problems <- c(problems, paste0(context$python, ": ", said[[length(said)]]))
  }
  place <- regmatches(context$driver, regexec("^\\[?(.*?)\\]?:([0-9]+)$", context$driver))[[1L]]
  reached <- suppressWarnings(tryCatch(
    {
      close(socketConnection(place[[2L]], as.integer(place[[3L]]), timeout = 5, open = "r+"))
      TRUE
    },
    error = function(error) FALSE
  ))
  if (!reached) {
    problems <- c(problems, paste("it cannot reach the driver at", context$driver))
  }
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
    "from pybackend.launchers.apply_task import main; main(*sys.argv[1:])"
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
