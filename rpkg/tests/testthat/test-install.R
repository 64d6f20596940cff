test_that("the source is a wheel, a checkout or nothing", {
  empty <- withr::local_tempdir("empty")
  expect_error(check_source("nowhere.whl"), "does not exist", class = "tfdist_error_input")
  expect_error(check_source(empty), "neither a wheel", class = "tfdist_error_input")
  expect_snapshot(error = TRUE, {
    install_tfdist("nowhere.whl")
    install_tfdist(envname = 3)
    install_tfdist(extras = TRUE)
  })
})

test_that("pip is asked for the wheel or checkout with its extras", {
  checkout <- withr::local_tempdir("checkout")
  file.create(file.path(checkout, "pyproject.toml"))
  checkout <- normalizePath(checkout)
  expect_identical(python_requirement(checkout, "cpu"), paste0(checkout, "[cpu]"))
  expect_identical(python_requirement(checkout, NULL), checkout)
  expect_no_error(check_source(checkout))
})

test_that("without a wheel the package index is asked for the same version", {
  local_mocked_bindings(bundled_wheel = function() NULL)
  expect_identical(
    python_requirement(NULL, c("cpu", "spark")),
    sprintf("tfdist[cpu,spark]==%s", own_version())
  )
})

test_that("the environment is created if it is missing, then filled", {
  calls <- list()
  local_mocked_bindings(
    bundled_wheel = function() NULL,
    create_environment = function(envname, python) calls$create <<- list(envname, python)
  )
  local_mocked_bindings(
    virtualenv_exists = function(envname) FALSE,
    virtualenv_install = function(envname, packages, ...) calls$install <<- list(packages, ...),
    virtualenv_python = function(envname) file.path("/envs", envname, "bin", "python"),
    py_available = function(...) FALSE,
    .package = "reticulate"
  )
  expect_snapshot(
    install_tfdist(envname = "other", python = "3.12", pip_options = "--no-index"),
    transform = function(lines) gsub(own_version(), "<version>", lines, fixed = TRUE)
  )
  expect_identical(calls$create, list("other", "3.12"))
  expect_identical(calls$install$pip_options, "--no-index")
})
