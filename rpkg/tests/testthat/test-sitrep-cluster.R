test_that("the workers of this machine are examined, with a row for each", {
  skip_if_no_pybackend()
  report <- tfdist_sitrep("local[2]", quiet = TRUE)
  expect_identical(report$problems, character())
  cluster <- report$cluster
  expect_identical(
    names(cluster),
    c(
      "rank",
      "host",
      "python",
      "python_version",
      "tensorflow",
      "keras",
      "r",
      "cores",
      "memory_gb",
      "gpus",
      "reaches"
    )
  )
  expect_identical(cluster$rank, 0:1)
  expect_identical(cluster$host, c("127.0.0.1", "127.0.0.1"))
  expect_identical(cluster$reaches, c(TRUE, TRUE))
  expect_identical(unique(cluster$python_version), report$python_version)
  expect_identical(unique(cluster$keras), report$keras)
})

test_full("the slots of a connection are examined", {
  sc <- file_connection("local[2]")
  report <- tfdist_sitrep(sc, quiet = TRUE)
  expect_identical(report$problems, character())
  expect_identical(report$cluster$rank, 0:1)
  expect_identical(report$cluster$reaches, c(TRUE, TRUE))
})

test_that("what a host does not have is NA, and without workers there are no rows", {
  worker <- list(
    rank = 0L,
    host = "10.0.0.1",
    python = "/usr/bin/python3",
    python_version = "3.11.7",
    tensorflow = NULL,
    keras = "3.15.1",
    r = NULL,
    cores = 8L,
    memory_gb = 31.5,
    gpus = c("NVIDIA H200", "NVIDIA H200"),
    reaches = FALSE
  )
  frame <- cluster_frame(list(worker))
  expect_identical(frame$tensorflow, NA_character_)
  expect_identical(frame$r, NA_character_)
  expect_identical(frame$gpus, 2L)
  expect_false(frame$reaches)
  none <- cluster_frame(list())
  expect_identical(nrow(none), 0L)
  expect_identical(vapply(none, typeof, ""), vapply(frame, typeof, ""))
})

test_that("hosts are printed, then what to fix", {
  host <- function(name, r) {
    lines <- c(
      "Python 3.11.7, /opt/{python}",
      "TensorFlow 2.21.0, Keras 3.15.1, numpy 2.4.6, h5py 3.14.0, cloudpickle 3.1.2, pyarrow 26.0.1",
      r,
      "8 cores, 31 GB of memory, no GPU",
      "2 slots here, which can reach all other workers"
    )
    list(name = name, slots = 2L, lines = as.list(lines))
  }
  hosts <- list(
    host("10.0.0.1 (node1)", "R 4.2.2, /usr/bin/Rscript, reticulate 1.47.0, no rpy2"),
    host("10.0.0.2 (node2)", "no R, no reticulate, no rpy2")
  )
  expect_snapshot(print_cluster(list(
    hosts = hosts,
    problems = character(),
    verdict = "ready: 4 workers on 2 hosts, and each can reach all others"
  )))
  expect_snapshot(print_cluster(list(
    hosts = list(),
    problems = c("first {problem}", "second"),
    verdict = "not ready: fix the first problem above, then probe again"
  )))
})
