test_full("a training writes for TensorBoard, which opens and ends", {
  skip_if_no_pybackend()
  folder <- file.path(withr::local_tempdir(), "run")
  fit <- train_flowers(iris, epochs = 2, callbacks = track_tensorboard(folder))
  expect_identical(fit$tensorboard, normalizePath(folder))
  expect_length(list.files(file.path(folder, "train"), "tfevents"), 1L)

  expect_message(view <- view_tensorboard(fit, open = FALSE), "http://127.0.0.1:")
  on.exit(view$close())
  answer <- jsonlite::fromJSON(paste0(view$url, "data/environment"))
  expect_match(answer$data_location, folder, fixed = TRUE)
  view$close()
  expect_error(suppressWarnings(readLines(view$url)))
})

test_that("there must be something to show", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    view_tensorboard(example_fit())
    view_tensorboard(7)
    track_tensorboard(7)
    track_tensorboard("")
    train_mnist("local", tensorboard = TRUE)
  })
})
