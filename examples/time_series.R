# Predict the temperature of the next month with a recurrent network and two workers.
#
# The series is real: R's data set nottem, the monthly mean temperatures of Nottingham, 1920 to
# 1939. The last four years are the test set.
#
#   Rscript examples/time_series.R [EPOCHS]

library(tfdist)
suppressMessages(library(keras3))

past <- 12
epochs <- as.integer(c(commandArgs(TRUE), 40)[1])

celsius <- (as.numeric(nottem) - 32) / 1.8
# A row per window: the month after it, then the window's months, the last one first.
windows <- embed(celsius, past + 1)
x <- array((windows[, (past + 1):2] - 9) / 5, c(nrow(windows), past, 1))
y <- windows[, 1]
is_test <- seq_along(y) > length(y) - 48

new_model <- function() {
  keras_model_sequential(input_shape = c(past, 1)) |>
    layer_gru(16) |>
    layer_dense(1) |>
    layer_rescaling(5, offset = 9) |>
    compile(optimizer_adam(0.01), "mse")
}
fit <- barrier_train(
  "local",
  new_model,
  list(x[!is_test, , , drop = FALSE], y[!is_test]),
  workers = 2,
  epochs = epochs,
  batch_size = 16,
  seed = 1,
  verbose = 0
)

guesses <- predict(fit, x[is_test, , , drop = FALSE])
cat(sprintf("%d months, %d for the test\n", sum(!is_test), sum(is_test)))
cat(sprintf(
  "mean error %.2f degrees; of the month before as a guess: %.2f\n",
  mean(abs(guesses - y[is_test])),
  mean(abs(windows[is_test, 2] - y[is_test]))
))
