# usage: Rscript benchmarks/sql_orbital.R INPUTS HIDDEN CLASSES
# Translates a dense network to SQL with orbital, if installed; prints seconds
# and bytes as JSON. The network is from nnet: orbital does not support Keras.
local({
  sizes <- as.integer(commandArgs(trailingOnly = TRUE))
  set.seed(1)
  rows <- 20L * sizes[[3]]
  data <- as.data.frame(matrix(runif(rows * sizes[[1]]), rows))
  data$label <- factor(rep(letters[seq_len(sizes[[3]])], 20L))
  most <- (sizes[[1]] + 1L) * sizes[[2]] + (sizes[[2]] + 1L) * sizes[[3]]
  model <- parsnip::mlp("classification", "nnet", hidden_units = sizes[[2]], epochs = 1L)
  model <- parsnip::set_args(model, MaxNWts = most)
  fitted <- parsnip::fit(model, label ~ ., data)
  began <- proc.time()[["elapsed"]]
  made <- orbital::orbital(fitted, type = "prob")
  sql <- orbital::orbital_sql(made, dbplyr::simulate_postgres())
  seconds <- proc.time()[["elapsed"]] - began
  cat(jsonlite::toJSON(list(seconds = seconds, bytes = sum(nchar(sql))), auto_unbox = TRUE))
})
