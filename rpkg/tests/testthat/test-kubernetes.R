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

test_that("Python takes what R has made", {
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
