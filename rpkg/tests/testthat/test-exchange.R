test_that("bad ways to exchange are errors", {
  expect_snapshot(error = TRUE, {
    exchange(transport = "udp")
    exchange(compression = "zip")
    exchange(transport = "tf", compression = "fp16")
    exchange(bucket_mb = 0)
    local_steps(1)
    local_steps(10, learning_rate = Inf)
    local_steps(10, momentum = 1)
    local_steps(10, compression = "zip")
  })
  expect_error(exchange(bucket_mb = "all"), class = "tfdist_error_input")
  expect_error(local_steps(0), class = "tfdist_error_input")
})
