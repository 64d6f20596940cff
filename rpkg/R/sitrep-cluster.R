# Software of the hosts of a cluster, and the connections between its workers.

# Check every slot with a short barrier job. Problems are returned, not raised.
gather_cluster <- function(route, sc, call = caller_env()) {
  if (route$kind == "launcher") {
    abort_input(
      "`tfdist_sitrep()` examines clusters of Spark, but `sc` is a launcher without Spark.",
      i = "Use `barrier_apply(sc, function(ctx) ctx$rank)`: its error names what a host lacks.",
      call = call
    )
  }
  # "local[4]" has the number of workers; its session is NULL.
  session <- if (route$kind == "local") sc else open_session(route, call)
  found <- call_python(pybackend(call)$bridge$probe, session, call = call)
  list(
    workers = cluster_frame(found$workers),
    problems = as.character(unlist(found$problems)),
    hosts = found$hosts,
    verdict = found$verdict
  )
}

cluster_frame <- function(workers) {
  text <- NA_character_
  rows <- frame_of(
    workers,
    list(
      rank = NA_integer_,
      host = text,
      python = text,
      python_version = text,
      tensorflow = text,
      keras = text,
      r = text,
      cores = NA_integer_,
      memory_gb = NA_real_
    )
  )
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
