# Runs the R package's tests against the installed package, with live output.
results <- testthat::test_dir(
  "rpkg/tests/testthat",
  package = "tfdist",
  load_package = "installed",
  reporter = testthat::MultiReporter$new(list(
    testthat::ProgressReporter$new(show_praise = FALSE, update_interval = 5),
    testthat::SlowReporter$new(min_time = 10)
  )),
  stop_on_failure = FALSE
)
# Once more at the end: of a long log often only that is kept.
for (test in results) {
  for (found in test$results) {
    if (inherits(found, c("expectation_failure", "expectation_error"))) {
      cat(sprintf("\n%s: %s\n%s\n", test$file, test$test, format(found)))
    }
  }
}

results <- as.data.frame(results)
failed <- sum(results$failed) + sum(results$error)
skipped <- sum(results$skipped)
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
