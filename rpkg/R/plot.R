#' @rdname tfdist_fit
#' @param engine What draws the plot: `"ggplot2"`, R's own graphics (`"base"`), or ggplot2 if it is
#'   installed (`"auto"`).
#' @export
plot.tfdist_fit <- function(x, ..., engine = "auto") {
  check_one_of(engine, c("auto", "ggplot2", "base"))
  if (engine == "ggplot2") {
    check_installed("ggplot2", "`engine = \"ggplot2\"`")
  }
  if (engine == "auto") {
    engine <- if (requireNamespace("ggplot2", quietly = TRUE)) "ggplot2" else "base"
  }
  if (engine == "ggplot2") plot_ggplot2(x) else plot_base(x)
}

plot_ggplot2 <- function(fit) {
  history <- as.data.frame(fit)
  ggplot2::ggplot(history, ggplot2::aes(.data$epoch, .data$value, colour = .data$data)) +
    ggplot2::geom_line() +
    ggplot2::geom_point() +
    ggplot2::facet_wrap(~metric, ncol = 1L, scales = "free_y", strip.position = "left") +
    ggplot2::scale_x_continuous(breaks = whole_breaks) +
    ggplot2::labs(x = "epoch", y = NULL, colour = NULL) +
    ggplot2::theme(strip.placement = "outside", strip.background = ggplot2::element_blank())
}

whole_breaks <- function(limits) {
  breaks <- pretty(limits)
  breaks[breaks == round(breaks)]
}

plot_base <- function(fit) {
  history <- as.data.frame(fit)
  metrics <- levels(history$metric)
  saved <- graphics::par(mfrow = c(length(metrics), 1L), mar = c(4, 4, 1, 1))
  on.exit(graphics::par(saved), add = TRUE)
  for (metric in metrics) {
    plot_metric(history[history$metric == metric, ], metric)
  }
  invisible(fit)
}

plot_metric <- function(history, metric) {
  colours <- c(training = "#1b6ca8", validation = "#d1495b")
  graphics::plot.default(
    history$epoch,
    history$value,
    type = "n",
    xlab = "epoch",
    ylab = metric,
    xaxt = "n"
  )
  graphics::axis(1L, at = unique(history$epoch))
  for (data in levels(droplevels(history$data))) {
    rows <- history[history$data == data, ]
    graphics::lines(rows$epoch, rows$value, type = "o", pch = 19L, col = colours[[data]])
  }
  shown <- levels(droplevels(history$data))
  graphics::legend("right", legend = shown, col = colours[shown], lty = 1L, bty = "n")
}
