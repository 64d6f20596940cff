test_that("wrong lists of hosts are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    hosts("a:2,b:two")
    hosts()
    hosts("a", ssh_options = 2222)
    hosts("a", environment = "x")
    hosts("a", environment = c("1A" = "x"))
    hosts("a", ssh_options = "-p 22")
    hosts(hostfile = "no/such/file")
  })
  expect_error(hosts("-oProxyCommand=x"), class = "tfdist_error_input")
})

test_that("Python takes what R has made", {
  skip_if_no_pybackend()
  made <- hosts(c("a:2", "ann@[fd00::1]"), ssh_options = "-4", environment = c(GREETING = "hi"))
  route <- check_sc(made)
  launcher <- open_session(route)
  expect_identical(launcher$count_workers(NULL), 3L)
  expect_identical(launcher$environment, list(GREETING = "hi"))
  # What only Python checks is reported at once, too.
  expect_error(hosts("a:9999"), "asks for 9999 workers", class = "tfdist_error_input")
})
