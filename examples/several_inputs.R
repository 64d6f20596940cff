# Predict the price of diamonds: a model with several inputs, from a data frame.
#
# The rows are 4,000 of ggplot2's real data set diamonds. The weight and the proportions are
# numbers; cut, colour and clarity are grades, whose value the model learns.
#
#   Rscript examples/several_inputs.R [EPOCHS]

library(tfdist)
suppressMessages(library(keras3))

epochs <- as.integer(c(commandArgs(TRUE), 8)[1])

set.seed(1)
rows <- as.data.frame(ggplot2::diamonds)
rows <- rows[sample(nrow(rows), 4000), ]
numbers <- c("carat", "depth", "table")
grades <- c("cut", "color", "clarity")
counts <- vapply(rows[grades], nlevels, 0L)
rows[numbers] <- scale(rows[numbers])
rows[grades] <- lapply(rows[grades], function(grade) as.integer(grade) - 1L)
rows$price <- log(rows$price)

new_model <- function() {
  size <- keras_input(shape = 3, name = "size")
  inputs <- lapply(grades, function(name) {
    keras_input(shape = 1, name = name, dtype = "int32")
  })
  worth <- Map(
    function(input, count) {
      input |> layer_embedding(count, 2) |> layer_flatten()
    },
    inputs,
    counts
  )
  price <- layer_concatenate(c(list(size), unname(worth))) |>
    layer_dense(32, activation = "relu") |>
    layer_dense(16, activation = "relu") |>
    layer_dense(1) |>
    layer_rescaling(1, offset = 8)
  keras_model(c(list(size = size), setNames(inputs, grades)), price) |>
    compile(optimizer_adam(0.005), "mae")
}

test <- rows[1:1000, ]
train <- rows[-(1:1000), ]
features <- c(list(size = numbers), setNames(as.list(grades), grades))
fit <- barrier_train(
  "local",
  new_model,
  train,
  label = "price",
  features = features,
  workers = 2,
  epochs = epochs,
  seed = 1,
  verbose = 0
)

percent <- function(guess) {
  100 * (exp(stats::median(abs(guess - test$price))) - 1)
}
cat(sprintf("%d diamonds, %d for the test\n", nrow(train), nrow(test)))
cat(sprintf(
  "half of the prices are off by at most %.0f %%; with the mean as a guess: %.0f %%\n",
  percent(predict(fit, test, type = "raw")),
  percent(mean(train$price))
))
