test_that("what is asked of Kubernetes is checked before Python is used", {
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

test_that("Python refuses what R refuses, and takes the rest", {
  skip_if_no_pybackend()
  python <- pybackend()$kubernetes
  wrong <- list(
    image = list("two words", ""),
    namespace = list("a.b", strrep("a", 64)),
    cpus = list(0, "0m", "4x"),
    memory = list("8", "8Gb"),
    gpus = list(-1, 0.5),
    time_limit = list(0),
    service_account = list("-a"),
    node_selector = list(list(pool = "a b"), list("a b" = "c")),
    patience = list(0)
  )
  for (name in names(wrong)) {
    for (value in wrong[[name]]) {
      given <- utils::modifyList(list(image = "x"), rlang::set_names(list(value), name))
      expect_error(do.call(kubernetes, given), class = "tfdist_error_input", info = name)
      expect_error(
        do.call(call_python, c(python, given)),
        class = "tfdist_error_input",
        info = name
      )
    }
  }
  for (cpus in list(4, 0.5, "500m", "2")) {
    expect_no_error(kubernetes("x", cpus = cpus))
  }
  expect_no_error(kubernetes("x", memory = "1.5Gi", node_selector = c("x.io/pool" = "gpu-1")))
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
