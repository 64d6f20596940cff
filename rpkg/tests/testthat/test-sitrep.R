test_that("the report is complete, with or without Python", {
  report <- tfdist_sitrep(quiet = TRUE)
  expect_type(report$ready, "logical")
  expect_identical(report$packages$tfdist, own_version())
  expect_identical(report$r, as.character(getRversion()))
  expect_gte(report$cores, 1)
  expect_null(report$cluster)
  expect_snapshot(error = TRUE, tfdist_sitrep(quiet = NA))
  expect_error(tfdist_sitrep(TRUE), class = "tfdist_error_input")
})

test_that("with pybackend it is ready and the versions match", {
  skip_if_no_pybackend()
  report <- tfdist_sitrep(quiet = TRUE)
  expect_true(report$ready)
  expect_true(report$versions_match)
  expect_type(report$tensorflow, "character")
  skip_if_not_installed("sparklyr")
  expect_true(file.exists(file.path(report$spark_home, "bin", "spark-submit")))
  withr::local_envvar(SPARK_HOME = report$spark_home)
  expect_true(finds_spark())
})

test_that("the version of reticulate is checked that DESCRIPTION asks for", {
  imports <- strsplit(utils::packageDescription("tfdist")$Imports, ",\\s*")[[1]]
  versioned <- grep(">=", imports, value = TRUE)
  expect_identical(versioned, sprintf("reticulate (>= %s)", needed_reticulate))
  local_mocked_bindings(needed_reticulate = "1000.0")
  expect_error(load_pybackend(), "1000.0 is required")
})

test_that("missing parts are printed with what to do", {
  bare <- list(
    ready = FALSE,
    r = "4.2.2",
    packages = list(tfdist = "0.1.0", reticulate = "1.47.0", sparklyr = NULL, keras3 = NULL),
    problem = "there is no such file",
    cores = 2L
  )
  bare$packages["sparklyr"] <- list(NULL)
  withr::local_envvar(RETICULATE_PYTHON = NA)
  local_mocked_bindings(py_available = function(...) FALSE, .package = "reticulate")
  expect_snapshot(print_sitrep(bare))
  full <- list(
    ready = TRUE,
    r = "4.2.2",
    packages = list(tfdist = "0.1.0", reticulate = "1.47.0", sparklyr = "1.9.6"),
    python = "/opt/python",
    python_version = "3.11.7",
    python_reason = "chosen by RETICULATE_PYTHON",
    pybackend = "0.0.9",
    versions_match = FALSE,
    tensorflow = "2.21.0",
    keras = "3.15.1",
    pyspark = "4.2.1",
    spark_home = "/opt/lib/pyspark",
    spark_is_found = FALSE,
    rpy2 = "3.6.9",
    rpy2_problem = "ffi.error: symbol 'R_getVar' not found",
    java = "/usr/bin/java",
    cores = 1L
  )
  expect_snapshot(print_sitrep(full))
})
