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
  expect_identical(python_requirements(checkout, "cpu"), paste0(checkout, "[cpu]"))
  expect_identical(python_requirements(checkout, NULL), checkout)
  expect_identical(
    python_requirements(checkout, c("cpu", "spark")),
    c(paste0(checkout, "[cpu,spark]"), "pyspark<4.3")
  )
  expect_identical(
    python_requirements(checkout, c("cpu", "r"), r = numeric_version("4.4.3")),
    paste0(checkout, "[cpu,r44]")
  )
  expect_identical(
    python_requirements(checkout, "r", r = numeric_version("4.5.0")),
    paste0(checkout, "[r]")
  )
  expect_no_error(check_source(checkout))
})

test_that("an installed package holds a wheel, or the sources, or neither", {
  folder <- withr::local_tempdir("python")
  expect_null(bundled_python(""))
  expect_null(bundled_python(folder))
  # What a symbolic link becomes on a system without symbolic links.
  writeLines("../../../pybackend", file.path(folder, "pybackend"))
  file.create(file.path(folder, "pyproject.toml"))
  expect_null(bundled_python(folder))
  unlink(file.path(folder, "pybackend"))
  dir.create(file.path(folder, "pybackend"))
  file.create(file.path(folder, "pybackend", "__init__.py"))
  expect_identical(bundled_python(folder), folder)
  wheel <- file.path(folder, sprintf("tfdist-%s-py3-none-any.whl", own_version()))
  file.create(wheel)
  expect_identical(bundled_python(folder), wheel)
})

test_that("without a Python half the three ways to one are named", {
  local_mocked_bindings(bundled_python = function() NULL)
  expect_snapshot(error = TRUE, install_tfdist())
})

test_that("the environment is created if it is missing, then filled", {
  calls <- list()
  environments <- withr::local_tempdir("envs")
  pyspark <- file.path(environments, "other", "lib", "python3.12", "site-packages", "pyspark")
  dir.create(pyspark, recursive = TRUE)
  withr::local_envvar(SPARK_HOME = NA)
  local_mocked_bindings(
    bundled_python = function() "/",
    find_python = function(python) python,
    create_environment = function(envname, python) calls$create <<- list(envname, python),
    run_pip = function(...) calls$pip <<- list(...)
  )
  local_mocked_bindings(
    virtualenv_exists = function(envname) FALSE,
    virtualenv_python = function(envname) file.path(environments, envname, "bin", "python"),
    py_available = function(...) FALSE,
    .package = "reticulate"
  )
  expect_snapshot(
    install_tfdist(NULL, "other", c("cpu", "spark"), "3.12", pip_options = "--no-index"),
    transform = function(lines) {
      lines <- gsub(own_version(), "<version>", lines, fixed = TRUE)
      gsub(environments, "/envs", lines, fixed = TRUE)
    }
  )
  expect_identical(calls$create, list("other", "3.12"))
  expect_identical(
    calls$pip,
    list(
      file.path(environments, "other"),
      c("/[cpu,spark]", "pyspark<4.3"),
      "--no-index"
    )
  )
})
