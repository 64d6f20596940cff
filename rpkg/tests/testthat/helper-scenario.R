# The job that every route and both languages run; its expected result comes from Python.
scenario <- function() {
  reticulate::import_from_path("scenario", test_path("scenario"), convert = TRUE)
}

scenario_job <- function() jsonlite::fromJSON(test_path("scenario", "job.json"))

scenario_arrays <- function() {
  job <- scenario_job()
  cell <- function(row, column) ((row * 7 + column * 13) %% 23) / 23 - 0.5
  rows <- seq_len(job$rows) - 1
  list(outer(rows, seq_len(job$features) - 1, cell), as.integer((rows * 5) %% job$classes))
}

# A function that builds the model in R; `job` is captured.
scenario_model <- function() {
  job <- scenario_job()
  eval(parse(test_path("scenario", "model.R")))
}

scenario_train <- function(sc, ...) {
  job <- scenario_job()
  barrier_train(
    sc,
    ...,
    data = scenario_arrays(),
    workers = job$workers,
    epochs = job$epochs,
    batch_size = job$batch_size,
    seed = job$seed,
    verbose = 0
  )
}

expect_scenario <- function(fit) {
  expect_lt(scenario()$difference(fit_weights(fit)), 1e-6)
  expect_identical(sum(fit$workers$rows), as.integer(scenario_job()$rows))
}
