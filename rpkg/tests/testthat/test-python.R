test_that("a missing pybackend is an error that names the Python and what to do", {
  config <- list(
    python = "/usr/bin/python3",
    version = numeric_version("3.11"),
    forced = "RETICULATE_PYTHON"
  )
  local_mocked_bindings(py_available = function(...) FALSE, .package = "reticulate")
  withr::local_envvar(RETICULATE_PYTHON = NA)
  expect_snapshot(error = TRUE, {
    abort_no_pybackend(config, "It has no module pybackend.")
    abort_no_pybackend(list(problem = "there is no such file"), NULL)
  })
  expect_error(
    abort_no_pybackend(config, "gone"),
    class = "tfdist_error_python"
  )
})

test_that("a variable that chooses another Python is to be unset first", {
  withr::local_envvar(RETICULATE_PYTHON = "/usr/bin/python3")
  expect_match(how_to_install(), "^Unset `RETICULATE_PYTHON` [(]/usr/bin/python3; in .Renviron?")
})

test_that("the reason for the choice of Python is given", {
  expect_match(python_reason(list(forced = "PATH")), "chosen by PATH")
  expect_match(python_reason(list(forced = "import(\"pybackend\")")), "of tfdist")
  expect_match(python_reason(list(virtualenv = "/envs/r-tfdist")), "r-tfdist")
  expect_match(python_reason(list(virtualenv = "")), "search path")
})

test_that("different versions are a warning that says which half to update", {
  local_mocked_bindings(own_version = function() "0.1.0")
  expect_snapshot(warn_other_version("0.0.9"))
  expect_snapshot(warn_other_version("0.2.0"))
  expect_no_warning(warn_other_version("0.1.0"))
  expect_true(is_older("0.1.0.dev1", "0.1.0"))
})

test_that("reticulate's managed Python is off during the search, and only then", {
  withr::local_envvar(RETICULATE_USE_MANAGED_VENV = NA)
  seen <- (function() {
    local_no_managed_python()
    Sys.getenv("RETICULATE_USE_MANAGED_VENV")
  })()
  expect_identical(seen, "no")
  expect_identical(Sys.getenv("RETICULATE_USE_MANAGED_VENV", NA), NA_character_)
})

# Output of an R process that runs these lines, with this level of TensorFlow's messages.
run_script <- function(level, lines) {
  withr::local_envvar(TF_CPP_MIN_LOG_LEVEL = level)
  script <- withr::local_tempfile(lines = lines, fileext = ".R")
  system2(file.path(R.home("bin"), "Rscript"), script, stdout = TRUE, stderr = TRUE)
}

test_full("a training prints no start-up lines", {
  skip_if_no_pybackend()
  # The user imports Keras before tfdist is called.
  code <- c(
    "library(tfdist)",
    "keras <- reticulate::import('keras')",
    "model <- keras$Sequential(list(keras$Input(reticulate::tuple(4L)), keras$layers$Dense(3L)))",
    "model$compile('sgd', 'mse')",
    "data <- list(as.matrix(iris[1:4]), diag(3)[iris$Species, ])",
    "fit <- barrier_train('local', model, data, workers = 1, verbose = 0)",
    "message('trained ', nrow(fit$workers))"
  )
  expect_identical(run_script(NA, code), "trained 1")
})

test_full("TF_CPP_MIN_LOG_LEVEL asks for the start-up lines", {
  skip_if_no_pybackend()
  code <- c("library(tfdist)", "keras <- reticulate::import('keras')")
  expect_match(run_script("0", code), "oneDNN|CPU instructions", all = FALSE)
})

test_that("a call returns its value, and its failure as a condition", {
  skip_if_no_pybackend()
  builtins <- reticulate::import_builtins()
  expect_identical(call_python(builtins$len, list(1, 2)), 2L)
  # R cannot store this message: it would crash.
  expect_identical(call_python(builtins$chr, 0L), "\\0")
  # From outside of pybackend, like Keras's own errors.
  condition <- tryCatch(call_python(builtins$int, "x"), tfdist_error = identity)
  expect_s3_class(condition, "tfdist_error_python")
  expect_match(conditionMessage(condition), "ValueError")
})

test_that("an interrupt stays an interrupt", {
  skip_if_no_pybackend()
  main <- reticulate::py_run_string(
    paste(
      "import os, signal, time",
      "def pressed():",
      "    os.kill(os.getpid(), signal.SIGINT)",
      "    time.sleep(60)",
      sep = "\n"
    )
  )
  expect_message(
    answer <- tryCatch(call_python(main$pressed), interrupt = function(i) "interrupted"),
    "stopped"
  )
  expect_identical(answer, "interrupted")
})

test_that("the package loads without reticulate, which later asks for tfdist's Python", {
  script <- withr::local_tempfile(
    fileext = ".R",
    lines = c(
      "invisible(loadNamespace('tfdist'))",
      "cat('reticulate' %in% loadedNamespaces(), '')",
      "invisible(loadNamespace('reticulate'))",
      "cat(reticulate::py_discover_config()$required_module)"
    )
  )
  said <- system2(file.path(R.home("bin"), "Rscript"), c("--vanilla", script), stdout = TRUE)
  expect_identical(utils::tail(said, 1L), "FALSE pybackend")
})
