# Classify sentences by the package that they describe, with two workers.
#
# The sentences are real: those of the help pages of R's own packages stats and graphics. Every
# fifth page is in the test set.
#
#   Rscript examples/text_classification.R [EPOCHS]

library(tfdist)
suppressMessages(library(keras3))

packages <- c("graphics", "stats")
epochs <- as.integer(c(commandArgs(TRUE), 6)[1])

read_sentences <- function(package) {
  pages <- tools::Rd_db(package)
  found <- lapply(seq_along(pages), function(number) {
    page <- pages[[number]]
    tags <- vapply(page, attr, "", "Rd_tag")
    text <- unlist(page[
      tags %in% c("\\description", "\\details", "\\arguments")
    ])
    sentences <- unlist(strsplit(paste(text, collapse = " "), "[.;:] "))
    sentences <- sentences[
      lengths(strsplit(trimws(sentences), "[[:space:]]+")) > 4
    ]
    data.frame(
      sentence = sentences,
      is_test = rep(number %% 5 == 0, length(sentences))
    )
  })
  cbind(do.call(rbind, found), label = match(package, packages) - 1L)
}
rows <- do.call(rbind, lapply(packages, read_sentences))

# Words become numbers here, once; the workers get arrays of numbers.
words <- layer_text_vectorization(
  max_tokens = 3000,
  output_sequence_length = 30
)
adapt(words, rows$sentence[!rows$is_test])
tokens <- as.array(words(rows$sentence))

new_model <- function() {
  keras_model_sequential(input_shape = 30, input_dtype = "int32") |>
    layer_embedding(3000, 16) |>
    layer_global_average_pooling_1d() |>
    layer_dense(1, activation = "sigmoid") |>
    compile(optimizer_adam(0.01), "binary_crossentropy", metrics = "accuracy")
}
train <- list(tokens[!rows$is_test, ], rows$label[!rows$is_test])
fit <- barrier_train(
  "local",
  new_model,
  train,
  workers = 2,
  epochs = epochs,
  seed = 1,
  verbose = 0
)

test <- rows$label[rows$is_test]
guesses <- as.integer(predict(fit, tokens[rows$is_test, ]) > 0.5)
cat(sprintf(
  "%d sentences, %d for the test\n",
  sum(!rows$is_test),
  sum(rows$is_test)
))
cat(sprintf(
  "accuracy %.3f; always the more frequent package: %.3f\n",
  mean(guesses == test),
  max(mean(test), 1 - mean(test))
))
