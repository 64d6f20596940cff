# Transfer learning: a network trained on five digits learns the other five from few images.
#
# The base is trained on 0 to 4; with its layers frozen, a new last layer learns 5 to 9. The data
# are MNIST, from TFDIST_MNIST or Keras's cache, or the images that come with tfdist.
#
#   Rscript examples/transfer_learning.R [EPOCHS]

library(tfdist)
suppressMessages(library(keras3))

epochs <- as.integer(c(commandArgs(TRUE), 8)[1])

digits <- mnist(limit = 4000)
images <- digits$x_train / 255
is_known <- digits$y_train < 5

# Returns a compiled classifier of five digits on top of `base`.
add_head <- function(base, name) {
  guess <- base$outputs[[1]] |>
    layer_dense(5, activation = "softmax", name = name)
  keras_model(base$inputs, guess) |>
    compile(
      optimizer_adam(0.003),
      "sparse_categorical_crossentropy",
      metrics = "accuracy"
    )
}

new_base <- function() {
  keras_model_sequential(input_shape = c(28, 28)) |>
    layer_reshape(c(28, 28, 1)) |>
    layer_conv_2d(16, 5, strides = 2, activation = "relu") |>
    layer_conv_2d(32, 3, strides = 2, activation = "relu") |>
    layer_flatten(name = "strokes")
}
known <- barrier_train(
  "local",
  function() add_head(new_base(), "known"),
  list(images[is_known, , ], digits$y_train[is_known]),
  workers = 2,
  epochs = 3,
  seed = 1,
  verbose = 0
)

frozen <- keras_model(
  known$model$inputs,
  get_layer(known$model, "strokes")$output
)
freeze_weights(frozen)
few <- head(which(!is_known), 300)
test <- tail(which(!is_known), 1000)
fit <- barrier_train(
  "local",
  function() add_head(frozen, "new"),
  list(images[few, , ], digits$y_train[few] - 5L),
  workers = 2,
  epochs = epochs,
  batch_size = 16,
  seed = 1,
  verbose = 0
)
right <- evaluate(
  fit$model,
  images[test, , ],
  digits$y_train[test] - 5L,
  verbose = 0
)
trained <- sum(lengths(lapply(fit$model$trainable_variables, as.array)))
cat(sprintf(
  "%d images, %d for the test; %d weights trained of %d\n",
  c(length(few)),
  length(test),
  trained,
  as.integer(fit$model$count_params())
))
cat(sprintf("accuracy %.3f; guessing: 0.200\n", right$accuracy))
