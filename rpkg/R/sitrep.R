#' Check this machine, or every host of a cluster
#'
#' Prints the versions of R, Python and the relevant packages, which Python is used and why, and
#' what is missing. If something does not work, run this first, and include its output in a bug
#' report.
#'
#' With `sc`, a short barrier job also checks the host behind every slot in the cluster, tests
#' whether every worker can reach every other worker over TCP, and shows what to fix on which host.
#'
#' @param sc `NULL` for this machine only; or the cluster to check, as in [barrier_train()].
#'   `"local[N]"` tests N workers on this machine; `"local"` tests two.
#' @param quiet `TRUE` prints nothing.
#' @return A list, invisibly: `ready` (`TRUE` if this machine is ready to train), `r`, `packages`,
#'   `python`, `python_version`, `python_reason`, `pybackend` (its version), `problem` (why
#'   pybackend cannot be used), `versions_match`, `tensorflow`, `keras`, `pyspark`, `rpy2`,
#'   `rpy2_problem` (why rpy2 cannot be used with this version of R), `spark_home` (the Spark
#'   installation inside PySpark, for `Sys.setenv(SPARK_HOME = )`), `spark_is_found` (`TRUE` if
#'   sparklyr finds a Spark installation), `java`, `cores`. Elements that were not found are `NULL`.
#'
#'   With `sc`, the list also has `cluster` and `problems`. `cluster` is a data frame with a row for
#'   each worker: `rank`, `host`, `python`, `python_version`, `tensorflow`, `keras`, `r`, `cores`,
#'   `memory_gb`, `gpus` (their number) and `reaches` (`TRUE` if it can reach all others), with `NA`
#'   for anything that the host does not have. `problems` contains a sentence for each problem; if
#'   it is empty, the cluster is ready. If the workers could not start, `problems` contains the
#'   reason, and `cluster` has no rows.
#' @export
#' @examples
#' tfdist_sitrep()
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' report <- tfdist_sitrep("local[2]", quiet = TRUE)
#' report$cluster
tfdist_sitrep <- function(sc = NULL, quiet = FALSE) {
  check_flag(quiet)
  route <- check_sc(sc)
  report <- gather_sitrep()
  cluster <- if (!is.null(sc)) gather_cluster(route, sc)
  if (!quiet) {
    print_sitrep(report)
    if (!is.null(cluster)) {
      print_cluster(cluster)
    }
  }
  if (!is.null(cluster)) {
    report$cluster <- cluster$workers
    report$problems <- cluster$problems
  }
  invisible(report)
}

gather_sitrep <- function() {
  problem <- pybackend_problem()
  found <- is.null(problem)
  doctor <- if (found) pybackend()$bridge$doctor()
  config <- running_python()
  packages <- c("tfdist", "reticulate", "sparklyr", "keras3")
  list(
    ready = found && !is.null(doctor$tensorflow) && !is.null(doctor$keras),
    r = as.character(getRversion()),
    packages = lapply(rlang::set_names(packages), installed_version),
    python = doctor$python %||% config$python,
    python_version = doctor$python_version %||% as_text(config$version),
    python_reason = config$problem %||% python_reason(config),
    pybackend = doctor$version,
    problem = problem,
    versions_match = if (found) identical(doctor$version, own_version()),
    tensorflow = doctor$tensorflow,
    keras = doctor$keras,
    pyspark = doctor$pyspark,
    rpy2 = doctor$rpy2,
    rpy2_problem = doctor$rpy2_problem,
    spark_home = doctor$spark_home,
    spark_is_found = if (!is.null(installed_version("sparklyr"))) finds_spark(),
    java = find_java(),
    cores = doctor$cores %||% parallel::detectCores()
  )
}

as_text <- function(x) if (!is.null(x)) as.character(x)

installed_version <- function(package) {
  if (nzchar(system.file(package = package))) as.character(utils::packageVersion(package))
}

# TRUE if sparklyr finds a Spark to start.
finds_spark <- function() {
  nzchar(Sys.getenv("SPARK_HOME")) || nrow(sparklyr::spark_installed_versions()) > 0L
}

find_java <- function() {
  home <- Sys.getenv("JAVA_HOME")
  java <- if (nzchar(home)) file.path(home, "bin", "java") else Sys.which("java")[[1L]]
  if (nzchar(java) && file.exists(java)) java
}

print_sitrep <- function(report) {
  cli::cli_h1("tfdist {report$packages$tfdist}")
  cli::cli_h2("R {report$r}")
  purposes <- c(reticulate = "", sparklyr = "for Spark", keras3 = "to build models")
  for (package in intersect(names(purposes), names(report$packages))) {
    how <- sprintf("%s: install.packages(\"%s\")", purposes[[package]], package)
    print_found(package, report$packages[[package]], how)
  }
  cli::cli_h2("Python")
  print_python(report)
  cli::cli_h2("Machine")
  print_found("Java", report$java, "only needed for Spark")
  cli::cli_bullets(c(" " = "{report$cores} core{?s}"))
  cli::cli_text()
  if (report$ready) {
    cli::cli_bullets(c(v = "Ready: try {.code train_mnist(\"local\", workers = 2)}"))
  } else {
    cli::cli_bullets(c(x = "Not ready. {how_to_install()}"))
  }
}

print_found <- function(name, version, absent = "not installed") {
  if (is.null(version)) {
    cli::cli_bullets(c("!" = "{name}: not found ({absent})"))
  } else {
    cli::cli_bullets(c(v = "{name} {version}"))
  }
}

print_python <- function(report) {
  which <- "{.path {report$python}} ({report$python_version}), {report$python_reason}"
  cli::cli_bullets(if (is.null(report$python)) c(x = "No Python was found") else c(" " = which))
  other <- "pybackend {report$pybackend}, which is not the version of the R package"
  if (isFALSE(report$versions_match)) {
    cli::cli_bullets(c(x = other))
  } else if (is.null(report$problem)) {
    print_found("pybackend", report$pybackend)
  } else {
    cli::cli_bullets(c(x = "pybackend: {report$problem}"))
  }
  print_found("TensorFlow", report$tensorflow)
  print_found("Keras", report$keras)
  print_found("pyspark", report$pyspark, "only needed for Spark")
  if (!is.null(report$spark_home) && isFALSE(report$spark_is_found)) {
    cli::cli_bullets(c("!" = "sparklyr finds no Spark to start. Before {.code spark_connect()}:"))
    # Verbatim: code must not be broken.
    cli::cli_verbatim(sprintf("  Sys.setenv(SPARK_HOME = \"%s\")", report$spark_home))
  }
  # Few users need rpy2, so it is not shown if it is absent.
  if (!is.null(report$rpy2_problem)) {
    cli::cli_bullets(c(
      x = "rpy2 {report$rpy2} cannot be used with R {report$r}: {report$rpy2_problem}",
      i = "Run {.code tfdist::install_tfdist(extras = \"r\")} to install a compatible one"
    ))
  } else if (!is.null(report$rpy2)) {
    print_found("rpy2", report$rpy2)
  }
}

# Check every slot of a cluster and the connections between them, with a short barrier job. Problems
# are returned, not raised.
gather_cluster <- function(route, sc) {
  if (route$kind == "launcher") {
    problem <- "`tfdist_sitrep()` examines clusters of Spark, but `sc` is a launcher without Spark."
    advice <- "Use `barrier_apply(sc, function(ctx) ctx$rank)`: its error names what a host lacks."
    abort_input(problem, i = advice)
  }
  # "local[4]" has the number of workers; its session is NULL.
  session <- if (route$kind == "local") sc else open_session(route)
  found <- call_bridge("probe", session)
  list(
    workers = cluster_frame(found$workers),
    problems = as.character(unlist(found$problems)),
    hosts = found$hosts,
    verdict = found$verdict
  )
}

cluster_frame <- function(workers) {
  text <- c("host", "python", "python_version", "tensorflow", "keras", "r")
  absent <- c(list(rank = NA_integer_), rlang::rep_named(text, list(NA_character_)))
  rows <- frame_of(workers, c(absent, list(cores = NA_integer_, memory_gb = NA_real_)))
  rows$gpus <- vapply(workers, function(worker) length(worker$gpus), 0L)
  cbind(rows, frame_of(workers, list(reaches = NA)))
}

print_cluster <- function(cluster) {
  cli::cli_h1("Cluster")
  for (host in cluster$hosts) {
    cli::cli_h2("{host$name}")
    # Verbatim: a path may contain braces, and a long line must not be broken.
    for (line in host$lines) {
      cli::cli_verbatim(paste0("  ", line))
    }
  }
  cli::cli_text()
  for (problem in cluster$problems) {
    cli::cli_bullets(c(x = "{problem}"))
  }
  mark <- if (length(cluster$problems)) "x" else "v"
  cli::cli_bullets(rlang::set_names("{cluster$verdict}", mark))
}
