# usage: Rscript scripts/r-test.R [plain] [local] [cluster] [test-file.R ...]
# Runs the R package's tests against the installed package: files without Spark
# (plain), with a local Spark (local), or with a cluster or server (cluster),
# and the files named. Each test has a time limit. The workspace stays empty,
# because tests check what functions in it carry along.
local({
  wanted <- commandArgs(trailingOnly = TRUE)
  limit <- 240

  folder <- "rpkg/tests/testthat"
  kind_of <- function(path) {
    lines <- readLines(path)
    if (
      any(grepl(
        'file_connection\\("local-cluster|file_pyspark_connection\\(',
        lines
      ))
    ) {
      "cluster"
    } else if (any(grepl("file_connection\\(", lines))) {
      "local"
    } else {
      "plain"
    }
  }
  paths <- list.files(folder, "^test-.*[.]R$", full.names = TRUE)
  chosen <- Filter(
    \(path) any(c(kind_of(path), basename(path)) %in% wanted),
    paths
  )
  if (length(chosen) == 0L) {
    stop("no such test file: ", toString(wanted), call. = FALSE)
  }
  names <- sub("^test-(.*)[.]R$", "\\1", basename(chosen))

  # A test that waits in R gets an error. If it waits in Python, where R's own
  # limit has no effect, the process exits with the stacks of its threads.
  limit_test <- function(seconds) {
    setTimeLimit(elapsed = if (is.null(seconds)) Inf else seconds)
    if (reticulate::py_available()) {
      faulthandler <- reticulate::import("faulthandler")
      if (is.null(seconds)) {
        faulthandler$cancel_dump_traceback_later()
      } else {
        faulthandler$dump_traceback_later(seconds + 30, exit = TRUE, file = 2L)
      }
    }
  }

  timed <- R6::R6Class(
    "Timed",
    inherit = testthat::Reporter,
    public = list(
      file = "",
      began = NULL,
      start_file = function(filename) self$file <- filename,
      start_test = function(context, test) {
        self$began <- proc.time()[["elapsed"]]
        # Printed at once: if the process exits here, this shows in which test.
        cat(sprintf("%s: %s", self$file, test))
        limit_test(limit)
      },
      end_test = function(context, test) {
        limit_test(NULL)
        cat(sprintf(" (%.1f s)\n", proc.time()[["elapsed"]] - self$began))
      }
    )
  )

  results <- testthat::test_dir(
    folder,
    filter = sprintf("^(%s)$", paste(names, collapse = "|")),
    package = "tfdist",
    load_package = "installed",
    reporter = timed$new(),
    stop_on_failure = FALSE
  )
  # At the end, with the reason last: often only the end of a log is stored.
  for (test in results) {
    for (found in test$results) {
      if (inherits(found, c("expectation_failure", "expectation_error"))) {
        cat(sprintf(
          "\n%s\nFAILED %s: %s\n%s\n",
          format(found),
          test$file,
          test$test,
          conditionMessage(found)
        ))
      }
    }
  }

  results <- as.data.frame(results)
  failed <- sum(results$failed) + sum(results$error)
  # Tests that test_full() leaves out do not count as skipped.
  is_full <- \(found) grepl("run by make test-full", conditionMessage(found))
  is_left_out <- vapply(
    results$result,
    \(all) any(vapply(all, is_full, NA)),
    NA
  )
  skipped <- sum(results$skipped & !is_left_out)
  required <- identical(Sys.getenv("TFDIST_TEST_REQUIRE"), "1")
  cat(sprintf(
    "R tests: %d passed, %d failed, %d skipped\n",
    sum(results$passed),
    failed,
    skipped
  ))
  if (nrow(results) == 0 || failed > 0 || (required && skipped > 0)) {
    quit(status = 1)
  }
})
