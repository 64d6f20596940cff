# Call a function as a worker does: in another environment, and without this session.
elsewhere <- function(carrier) unserialize(serialize(carrier, NULL))

carried <- function(f, extra = list()) {
  variables <- find_variables(f, "f")
  elsewhere(new_carrier(f, variables$globals, extra, identity))
}

test_that("captured variables travel, and those of the workspace that the function uses", {
  local_value <- 5
  f <- function(x) x + local_value
  carrier <- carried(f)
  local_value <- 6
  expect_identical(carrier(1), 6)

  withr::defer(rm("tfdist_workspace", "tfdist_helper", envir = globalenv()))
  assign("tfdist_workspace", 10, globalenv())
  assign("tfdist_helper", eval(quote(function(x) x * tfdist_workspace), globalenv()), globalenv())
  g <- eval(quote(function(x) tfdist_helper(x)), globalenv())
  found <- find_variables(g, "g")
  expect_setequal(names(found$globals), c("tfdist_workspace", "tfdist_helper"))
  carrier <- carried(g)
  assign("tfdist_workspace", 0, globalenv())
  expect_identical(carrier(2), 20)
})

test_that("functions of the workspace travel, even those not named in the source text", {
  withr::defer(rm("area", "area.square", "tfdist_k", envir = globalenv()))
  eval(
    quote({
      area <- function(x) UseMethod("area")
      area.square <- function(x) x$side^2
      tfdist_k <- 3
    }),
    globalenv()
  )
  f <- eval(quote(function(x) do.call("area", list(x))), globalenv())
  expect_true(all(c("area", "area.square") %in% names(find_variables(f, "f")$globals)))
  # Variables of a function in a list are found, too.
  steps <- list(add = eval(quote(function(x) x + tfdist_k), globalenv()))
  g <- function(x) steps$add(x)
  expect_true("tfdist_k" %in% names(find_variables(g, "g")$globals))
})

test_that("unevaluated arguments are left alone", {
  make <- function(n, unused, plot = stop("needed only for plotting")) function(ctx) n
  f <- make(1)
  expect_null(check_closure_size(f, list(), list(), "f"))
})

test_that("further arguments follow those of the worker", {
  expect_identical(carried(function(a, b, c) list(a, b, c), list(c = 3, 2))(1), list(1, 2, 3))
})

test_that("the packages that a function uses are found", {
  f <- function(x) expect_true(x)
  environment(f) <- globalenv()
  expect_identical(find_variables(f, "f")$packages, "testthat")
  expect_identical(find_variables(function(x) median(x), "f")$packages, character())
})

test_that("a function that captured too much is rejected before it is serialized", {
  big <- double(4e6)
  small <- 1
  f <- function() small
  withr::local_options(tfdist.max_function_mb = 10)
  used <- find_variables(f, "f")
  expect_snapshot(error = TRUE, check_closure_size(f, used$globals, list(), "f"))
  # The size of an environment is known only when it is serialized.
  hiding <- local(envir = new.env(parent = globalenv()), {
    hidden <- new.env(parent = emptyenv())
    hidden$big <- double(4e6)
    function() hidden
  })
  expect_error(
    as_r_function(hiding, NULL, identity, arg = "f"),
    "environments of functions or objects",
    class = "tfdist_error_input"
  )
  # Two gigabytes, which R stores as two numbers; they are rejected before serialize() runs.
  withr::local_options(tfdist.max_function_mb = NULL)
  local_mocked_bindings(new_carrier = function(...) stop("it was not measured first"))
  huge <- seq_len(5.4e8)
  expect_error(
    barrier_apply("local", function(ctx) length(huge), workers = 2),
    "would carry .* MB to every worker",
    class = "tfdist_error_input"
  )
})

test_that("Python objects of this session are rejected, with what to do instead", {
  skip_if_no_pybackend()
  keras <- reticulate::import("sys")
  object <- reticulate::r_to_py(list(1))
  several <- list(a = object)
  expect_snapshot(error = TRUE, {
    find_variables(function() keras$version, "model_fn")
    find_variables(function() object, "f")
    find_variables(function() several$a, "f")
    barrier_apply("local", function(ctx, m) m, m = object)
  })
})

test_that("variables that keras3's operators assign are not those of the session", {
  x <- y <- tape <- structure(list(), class = "python.builtin.object")
  step <- function(data) {
    .[x, list(y = y)] %<-% data
    with(new_tape() %as% tape, tape$watch(x[, 1]))
    function() c(x, y) %<-% data
  }
  find <- function(f) names(find_globals(f)$values)
  expect_identical(intersect(c("x", "y", "tape"), find(step)), character())
  expect_identical(intersect("x", find(function(data) step(data))), character())
  # Used before it is assigned.
  expect_in(
    "x",
    find(function(data) {
      first <- x
      c(x, y) %<-% data
    })
  )
  expect_identical(mark_unpacked(sum), sum)
  skip_if_not_installed("keras3")
  environment(step) <- rlang::env(asNamespace("keras3"))
  expect_in(c("%<-%", "%as%", "."), find(step))
})

test_that("a class of keras3 that was made in this session is rejected by its name", {
  skip_if_no_pybackend()
  skip_if_not_installed("keras3")
  net <- keras3::new_model_class("Net", call = function(x) x)
  expect_snapshot(error = TRUE, find_variables(function() net(), "model_fn"))
})
