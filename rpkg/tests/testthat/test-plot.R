test_that("ggplot2 draws a panel for each metric", {
  skip_if_not_installed("ggplot2")
  plot <- plot(example_fit(), engine = "ggplot2")
  expect_s3_class(plot, "ggplot")
  expect_identical(nrow(ggplot2::layer_data(plot)), 8L)
})

test_that("one epoch is points, and no word of ggplot2 about lines", {
  skip_if_not_installed("ggplot2")
  fit <- unclass(example_fit())
  fit$history <- lapply(fit$history, `[`, 1L)
  fit <- structure(fit, class = "tfdist_fit")
  withr::local_pdf(NULL)
  expect_no_message(print(ggplot2::autoplot(fit)))
})

test_that("R's own graphics draw the same", {
  withr::local_pdf(NULL)
  fit <- example_fit(validation = FALSE)
  before <- graphics::par("mfrow")
  expect_invisible(plot(fit, engine = "base"))
  expect_identical(graphics::par("mfrow"), before)
})

test_that("the plot shows the metrics that are asked for, and a legend where it tells lines apart", {
  skip_if_not_installed("ggplot2")
  plot <- ggplot2::autoplot(example_fit(), metrics = "accuracy")
  expect_identical(nrow(ggplot2::layer_data(plot)), 4L)
  expect_identical(plot$theme$legend.position, "top")
  alone <- ggplot2::autoplot(example_fit(validation = FALSE))
  expect_identical(alone$theme$legend.position, "none")
})

test_that("smooth lines go through the figures", {
  fit <- example_fit(validation = FALSE)
  fit$history <- list(loss = c(5, 3, 4, 2, 3, 1))
  fit["numbered"] <- list(NULL)
  history <- plotted_history(fit, NULL, TRUE)
  expect_equal(history$line, stats::lowess(1:6, fit$history$loss, f = 0.4, iter = 0)$y)
  expect_identical(history$value, fit$history$loss)
  # Two values are not smoothed.
  expect_identical(
    plotted_history(example_fit(), NULL, TRUE)$line,
    as.data.frame(example_fit())$value
  )
})

test_that("a number smooths as in Python", {
  fit <- example_fit(validation = FALSE)
  fit$history <- list(loss = c(5, 3, 4, 2, 3, 1))
  fit["numbered"] <- list(NULL)
  expect_identical(plotted_history(fit, NULL, 0)$line, fit$history$loss)
  skip_if_no_pybackend()
  curves <- reticulate::import("pybackend.core.api.rendering")
  curve <- curves$Curve("training", as.list(1:6), as.list(fit$history$loss))
  expect_equal(plotted_history(fit, NULL, 0.6)$line, curve$smoothed(0.6))
})

test_that("bad arguments are rejected", {
  none <- example_fit()
  none$history <- list()
  expect_snapshot(error = TRUE, {
    plot(example_fit(), engine = "lattice")
    plot(example_fit(), metrics = "val_loss")
    plot(example_fit(), smooth = "yes")
    plot(example_fit(), smooth = 1)
    plot(example_fit(), metric = "loss")
    plot(none)
  })
})

test_that("the axis marks whole epochs", {
  expect_identical(whole_breaks(c(1, 3)), c(1, 2, 3))
})
