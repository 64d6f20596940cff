test_that("a path that does not exist is named", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    mnist("no/such/mnist.npz")
    mnist(limit = 0)
    mnist(path = 3)
  })
})

test_that("images are arrays of grey values, labels digits", {
  skip_if_no_pybackend()
  digits <- suppressMessages(mnist(limit = 100))
  expect_identical(dim(digits$x_train), c(100L, 28L, 28L))
  expect_type(digits$x_train, "integer")
  expect_true(all(range(digits$x_train) == c(0L, 255L)))
  expect_length(digits$y_train, 100)
  expect_true(all(digits$y_train %in% 0:9))
  expect_identical(nrow(digits$x_test), length(digits$y_test))
})
