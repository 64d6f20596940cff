#' @rdname tfdist_fit
#' @param metrics Names of the metrics to plot, without `val_`. `NULL` (default): all.
#' @param smooth `TRUE` draws a smooth line with `stats::lowess()`. A number from 0 to less than 1
#'   draws an exponential moving average and sets the weight of the previous average, as in Python
#'   and TensorBoard. With 0 or `FALSE`, there is no smooth line. The original values are drawn
#'   faintly behind the smooth line.
#' @param engine Graphics system: `"ggplot2"`, `"base"`, or `"auto"` (default), which uses ggplot2
#'   if it is installed.
#' @export
plot.tfdist_fit <- function(x, ..., metrics = NULL, smooth = FALSE, engine = "auto") {
  check_dots_empty(...)
  check_one_of(engine, c("auto", "ggplot2", "base"))
  history <- plotted_history(x, metrics, smooth)
  if (engine == "ggplot2") {
    check_installed("ggplot2", "`engine = \"ggplot2\"`")
  }
  if (engine == "auto") {
    engine <- if (requireNamespace("ggplot2", quietly = TRUE)) "ggplot2" else "base"
  }
  if (engine == "ggplot2") {
    return(plot_ggplot2(history, smooth))
  }
  plot_base(history, smooth)
  invisible(x)
}

#' @rdname tfdist_fit
#' @exportS3Method ggplot2::autoplot
autoplot.tfdist_fit <- function(object, ..., metrics = NULL, smooth = FALSE) {
  check_dots_empty(...)
  plot_ggplot2(plotted_history(object, metrics, smooth), smooth)
}

line_colours <- c(training = "#1b6ca8", validation = "#d1495b")

# The values to draw, and with `smooth` their smooth line.
plotted_history <- function(fit, metrics, smooth) {
  fits <- rlang::is_bool(smooth) || (is_number(smooth) && smooth >= 0 && smooth < 1)
  check_fits(smooth, fits, "`TRUE`, `FALSE` or a number from 0 to below 1")
  check_strings(metrics, allow_null = TRUE)
  history <- as.data.frame(fit)
  if (nrow(history) == 0L) {
    abort_input("There is no history to plot: no epochs were run.")
  }
  known <- levels(history$metric)
  unknown <- setdiff(metrics, known)
  if (length(unknown)) {
    problem <- sprintf("`metrics` names \"%s\", which is not in the history.", unknown[[1L]])
    abort_input(problem, i = sprintf("The metrics are %s.", list_names(known)))
  }
  shown <- unique(metrics) %||% known
  history <- history[history$metric %in% shown, ]
  history$metric <- factor(history$metric, levels = shown)
  history$data <- droplevels(history$data)
  history$line <- if (smooth) smooth_lines(history, smooth) else history$value
  history
}

smooth_lines <- function(history, smooth) {
  smooth_one <- function(rows) {
    values <- history$value[rows]
    if (is.numeric(smooth)) {
      exponential_means(values, smooth)
    } else if (length(rows) < 3L) {
      values
    } else {
      # Without robust iterations, which would treat the steep first epochs as outliers.
      stats::lowess(history$epoch[rows], values, f = 0.4, iter = 0L)$y
    }
  }
  groups <- split(seq_len(nrow(history)), list(history$metric, history$data), drop = TRUE)
  line <- history$value
  line[unlist(groups)] <- unlist(lapply(groups, smooth_one))
  line
}

# The weights always sum to 1, as in Python: the first mean is the first value.
exponential_means <- function(values, weight) {
  fade <- function(initial, values) {
    step <- function(mean, value) weight * mean + (1 - weight) * value
    Reduce(step, values, initial, accumulate = TRUE)[-1L]
  }
  fade(0, values) / fade(0, rep(1, length(values)))
}

has_legend <- function(history) nlevels(history$data) > 1L

# Leave out lines of one point: ggplot2 would print a message for each.
of_several_epochs <- function(history) {
  history[stats::ave(history$epoch, history$metric, history$data, FUN = length) > 1, ]
}

plot_ggplot2 <- function(history, smooth) {
  panels <- nlevels(history$metric)
  alpha <- if (smooth) 0.35 else 1
  ggplot2::ggplot(history, ggplot2::aes(.data$epoch, colour = .data$data)) +
    ggplot2::geom_line(ggplot2::aes(y = .data$line), of_several_epochs, linewidth = 0.7) +
    ggplot2::geom_point(ggplot2::aes(y = .data$value), size = 1.6, alpha = alpha) +
    ggplot2::facet_wrap(~metric, ncol = if (panels > 3L) 2L else 1L, scales = "free_y") +
    ggplot2::scale_x_continuous(breaks = whole_breaks) +
    ggplot2::scale_colour_manual(values = line_colours) +
    ggplot2::labs(x = "epoch", y = NULL, colour = NULL) +
    theme_history(has_legend(history))
}

theme_history <- function(legend) {
  grey <- "grey35"
  ggplot2::theme(
    plot.background = ggplot2::element_rect(fill = "white", colour = NA),
    panel.background = ggplot2::element_rect(fill = "white", colour = NA),
    panel.grid.major = ggplot2::element_line(colour = "grey90", linewidth = 0.4),
    panel.grid.minor = ggplot2::element_blank(),
    panel.spacing = ggplot2::unit(10, "pt"),
    axis.ticks = ggplot2::element_blank(),
    axis.text = ggplot2::element_text(colour = grey),
    axis.title = ggplot2::element_text(colour = grey),
    strip.background = ggplot2::element_blank(),
    strip.text = ggplot2::element_text(hjust = 0, face = "bold", colour = "grey15"),
    legend.position = if (legend) "top" else "none",
    legend.justification = "left",
    legend.background = ggplot2::element_blank(),
    legend.key = ggplot2::element_blank()
  )
}

whole_breaks <- function(limits) {
  breaks <- pretty(limits)
  breaks[breaks == round(breaks)]
}

plot_base <- function(history, smooth) {
  metrics <- levels(history$metric)
  columns <- if (length(metrics) > 3L) 2L else 1L
  saved <- graphics::par(
    mfrow = c(ceiling(length(metrics) / columns), columns),
    mar = c(3, 3, 2, 1),
    mgp = c(1.8, 0.5, 0),
    tcl = 0,
    las = 1L
  )
  on.exit(graphics::par(saved), add = TRUE)
  for (metric in metrics) {
    plot_metric(history[history$metric == metric, ], metric, smooth)
    if (metric == metrics[[1L]] && has_legend(history)) {
      add_legend(levels(history$data))
    }
  }
}

# Above the first panel, where no line is.
add_legend <- function(shown) {
  graphics::legend(
    "bottomright",
    legend = shown,
    col = line_colours[shown],
    lwd = 2,
    bty = "n",
    horiz = TRUE,
    xpd = NA,
    inset = c(0, 1)
  )
}

plot_metric <- function(history, metric, smooth) {
  graphics::plot.default(
    history$epoch,
    history$value,
    ylim = range(history$value, history$line, finite = TRUE),
    type = "n",
    xlab = "epoch",
    ylab = "",
    axes = FALSE,
    bty = "n"
  )
  graphics::title(metric, adj = 0, line = 0.7, cex.main = 1)
  graphics::axis(1L, at = whole_breaks(range(history$epoch)), lwd = 0)
  graphics::axis(2L, lwd = 0)
  graphics::grid(col = "grey90", lty = 1L)
  for (data in levels(history$data)) {
    rows <- history[history$data == data, ]
    colour <- line_colours[[data]]
    points <- if (smooth) grDevices::adjustcolor(colour, 0.35) else colour
    graphics::lines(rows$epoch, rows$line, col = colour, lwd = 2)
    graphics::points(rows$epoch, rows$value, pch = 19L, cex = 0.8, col = points)
  }
}
