# Trains on MNIST by a launcher, or in processes that join: the other half of mnist.py.
given <- jsonlite::fromJSON(commandArgs(TRUE)[[1]])
if (!is.null(given$addresses)) {
  tfdist::join_workers(given$addresses, given$index)
}
place <- if (!is.null(given$launcher)) {
  do.call(getExportedValue("tfdist", given$launcher), given$options)
}
fit <- do.call(tfdist::train_mnist, c(list(place), given$arguments))
rank <- Sys.getenv("RANK", given$index)
tfdist::write_model(fit, file.path(given$folder, paste0(rank, ".h5")))
