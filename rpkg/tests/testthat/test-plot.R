test_that("ggplot2 draws a panel for each metric", {
  skip_if_not_installed("ggplot2")
  plot <- plot(example_fit(), engine = "ggplot2")
  expect_s3_class(plot, "ggplot")
  expect_identical(nrow(ggplot2::layer_data(plot)), 8L)
})

test_that("R's own graphics draw the same", {
  withr::local_pdf(NULL)
  fit <- example_fit(validation = FALSE)
  before <- graphics::par("mfrow")
  expect_invisible(plot(fit, engine = "base"))
  expect_identical(graphics::par("mfrow"), before)
})

test_that("other engines are rejected", {
  expect_snapshot(error = TRUE, plot(example_fit(), engine = "lattice"))
})

test_that("the axis marks whole epochs", {
  expect_identical(whole_breaks(c(1, 3)), c(1, 2, 3))
})
