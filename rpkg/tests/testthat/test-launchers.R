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

test_that("Python takes what R has made of hosts", {
  skip_if_no_pybackend()
  made <- hosts(c("a:2", "ann@[fd00::1]"), ssh_options = "-4", environment = c(GREETING = "hi"))
  route <- check_sc(made)
  launcher <- open_session(route)
  expect_identical(launcher$count_workers(NULL), 3L)
  expect_identical(launcher$environment, list(GREETING = "hi"))
  # What only Python checks is reported at once, too.
  expect_error(hosts("a:9999"), "asks for 9999 workers", class = "tfdist_error_input")
})

test_that("wrong settings of Slurm are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    slurm(nodes = 0)
    slurm("gpu", "2:00:00")
    slurm(options = "exclusive")
    slurm(time = "bad")
    slurm(options = list("-n" = 4))
    slurm(options = list(ntasks = 4))
    slurm(options = list(qos = "a\nb"))
    slurm(partition = "a\nb")
  })
  expect_error(slurm(patience = -1), class = "tfdist_error_input")
})

test_that("Python takes what R has made of Slurm", {
  skip_if_no_pybackend()
  made <- slurm("gpu", time = 90, nodes = 2, options = list(account = "physics", nice = 10))
  launcher <- open_session(check_sc(made))
  expect_identical(launcher$settings$time, "90")
  expect_identical(launcher$settings$options, list(account = "physics", nice = "10"))
  expect_identical(launcher$count_workers(NULL), 2L)
  for (time in c("90", "1:30", "1:30:00", "2-12", "2-12:00")) {
    expect_identical(open_session(check_sc(slurm(time = time)))$settings$time, time)
  }
})

test_that("wrong settings of Kubernetes are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    kubernetes(1)
    kubernetes("x", labels = "unnamed")
    kubernetes("x", labels = c(team = "two words"))
    kubernetes("x", namespace = "My_Space")
    kubernetes("x", cpus = "four")
    kubernetes("x", memory = 8)
    kubernetes("x", secrets = "S3 keys")
    kubernetes("x", tolerations = list(list(keys = "gpu")))
  })
})

test_that("Python takes what R has made of Kubernetes", {
  skip_if_no_pybackend()
  made <- kubernetes(
    "registry/tf:1",
    cpus = 4,
    gpus = 1,
    memory = "8Gi",
    secrets = "s3-keys",
    labels = c(team = "physics"),
    tolerations = list(list(key = "gpu", operator = "Exists"))
  )
  launcher <- open_session(check_sc(made))
  job <- launcher$plan(workers = 3L)[[1L]]
  expect_identical(job$spec$completions, 3L)
  expect_identical(job$metadata$labels$team, "physics")
  pod <- job$spec$template$spec
  expect_identical(pod$containers[[1L]]$resources$limits$cpu, "4")
  expect_identical(pod$tolerations[[1L]]$key, "gpu")
})
