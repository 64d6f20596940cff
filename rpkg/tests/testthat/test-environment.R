test_that("only a Python that TensorFlow has releases for is taken", {
  found <- "3.12.4"
  local_mocked_bindings(version_of_python = function(...) numeric_version(found))
  local_mocked_bindings(
    virtualenv_starter = function(version) if (version != "2.7") "/usr/bin/python3",
    .package = "reticulate"
  )
  expect_identical(find_python(NULL), "/usr/bin/python3")
  expect_snapshot(error = TRUE, {
    find_python("2.7")
    found <- "3.14.0"
    find_python("/usr/bin/python3")
  })
})

test_that("a Python says its version, and other programs none", {
  skip_if_no_pybackend()
  expect_gte(version_of_python(discover_python()$python), "3.11")
  expect_error(version_of_python(Sys.which("true")[[1]]), "cannot be run as Python")
})

run_sh <- function(script) {
  run_logged("sh", c("-c", script), title = "Doing", problem = "sh cannot do it.")
}

test_that("what a program prints is kept from the console, and shown if it fails", {
  expect_no_match(cli::cli_fmt(run_sh("echo quiet; echo loud >&2")), "quiet|loud")
  error <- tryCatch(
    suppressMessages(run_sh("seq 20; echo wrong >&2; exit 3")),
    tfdist_error_python = identity
  )
  said <- conditionMessage(error)
  expect_match(said, "sh cannot do it.", fixed = TRUE)
  expect_match(said, "20\nwrong", fixed = TRUE)
  expect_no_match(said, "\n5\n")
  log <- sub(".* is in (.*) until R exits.*", "\\1", said)
  withr::defer(unlink(log))
  expect_length(readLines(log), 21)
})

test_that("an interrupt ends the program", {
  folder <- withr::local_tempdir()
  withr::local_dir(folder)
  # The program interrupts R, and records that it received a signal.
  script <- "trap 'echo told >told; exit 1' INT; kill -INT %d; while :; do sleep 0.05; done"
  seen <- tryCatch(
    suppressMessages(run_sh(sprintf(script, Sys.getpid()))),
    interrupt = function(condition) "interrupted"
  )
  expect_identical(seen, "interrupted")
  expect_true(file.exists("told"))
})

test_that("progress names the package that pip is at", {
  expect_identical(name_package("Collecting numpy>=1.26 (from tfdist)"), ": numpy")
  expect_identical(name_package("  Downloading numpy-2.4.6-cp311-many.whl (9 MB)"), ": numpy-2.4.6")
  expect_identical(name_package("Processing /lib/tfdist/python"), ": python")
  expect_identical(name_package("Installing collected packages: a, b"), ": unpacking")
  expect_null(name_package("Requirement already satisfied: a"))
})
