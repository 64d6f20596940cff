# One of several sessions that train together: the other half of joined.py, in R.
given <- jsonlite::fromJSON(commandArgs(TRUE)[[1]])
programs <- reticulate::import_from_path(
  "joined",
  given$programs,
  convert = FALSE
)
tfdist::join_workers(given$addresses, given$index)
fit <- tfdist::barrier_train(
  NULL,
  programs$build,
  programs$make_rows(60L),
  batch_size = 8,
  seed = given$seed
)
found <- list(
  seed = fit$seed,
  rows = fit$workers$rows,
  hosts = fit$workers$host
)
cat("\n", jsonlite::toJSON(found, auto_unbox = TRUE), "\n", sep = "")
