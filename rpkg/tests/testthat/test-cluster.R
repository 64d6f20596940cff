test_that("wrong arguments are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    make_tf_config(8080)
    make_tf_config(character())
    make_tf_config("a:1", index = -1)
    make_tf_config("a:1", role = "boss")
    make_tf_config("a:1", ps = 3)
  })
})

test_that("one worker is a list of one in JSON", {
  skip_if_no_pybackend()
  config <- make_tf_config("10.0.0.1:2222", index = 0)
  expect_match(config, "\\[\\s*\"10.0.0.1:2222\"\\s*\\]")
})

test_that("all roles reach Python", {
  skip_if_no_pybackend()
  config <- make_tf_config(
    c("a:1", "b:1"),
    index = 0,
    role = "chief",
    chief = "c:1",
    ps = "d:1",
    evaluator = "e:1"
  )
  for (address in c("a:1", "b:1", "c:1", "d:1")) {
    expect_match(config, address, fixed = TRUE)
  }
  expect_match(config, "chief", fixed = TRUE)
})

test_that("a configuration that makes TensorFlow hang is a cluster error", {
  skip_if_no_pybackend()
  expect_error(make_tf_config(c("a:1", "a:1"), 0), class = "tfdist_error_cluster")
  expect_error(make_tf_config(c("a:0", "b:1"), 0), class = "tfdist_error_cluster")
  expect_error(make_tf_config(c("a:1", "b:1"), 2), class = "tfdist_error_cluster")
})
