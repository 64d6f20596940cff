test_that("shapes and values are sent in Python's form", {
  options <- data_options(
    tensors = list(
      image = list("uint8", c(28, 28)),
      words = list("int32", NA),
      tracks = list("float32", c(NA, 3))
    ),
    categories = list(color = factor(c("red", "blue")), size = c(1, 5), kind = "one"),
    tfrecord_spec = c(a = "float32", words = "int64[]")
  )
  fields <- lapply(as_python_data_options(unclass(options)), as_python_setting, call = NULL)
  expect_identical(
    fields$tensors,
    list(
      image = list("uint8", list(28, 28)),
      words = list("int32", list(NULL)),
      tracks = list("float32", list(NULL, 3))
    )
  )
  expect_identical(
    fields$categories,
    list(color = list("red", "blue"), size = list(1L, 5L), kind = list("one"))
  )
  expect_identical(fields$tfrecord_spec, list(a = "float32", words = "int64[]"))
  expect_true(fields$repartition)
  none <- as_python_data_options(unclass(data_options()))
  expect_null(as_python_setting(none$tensors, NULL))
})

test_that("bad data options are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    data_options(tensors = c(image = "uint8"))
    data_options(tensors = list(image = "uint8"))
    data_options(tensors = list(image = list("pixel", 28)))
    data_options(tensors = list(image = list("uint8", c(28, 0))))
    data_options(tensors = list(image = list("uint8", c(28, NA))))
    data_options(categories = c("red", "blue"))
    data_options(categories = list(color = c("red", "red")))
    data_options(categories = list(color = character()))
    data_options(tfrecord_spec = "int64")
    data_options(tfrecord_spec = c(a = "double"))
    data_options(repartition = "no")
    data_options(in_memory = NA)
  })
  expect_error(data_options(in_memory = 1), class = "tfdist_error_input")
})
