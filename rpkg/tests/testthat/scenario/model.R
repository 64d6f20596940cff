# The model of the scenario, built by R. `job` has the content of job.json.
function() {
  kernel <- function(seed) keras3::initializer_glorot_uniform(seed = as.integer(seed))
  model <- keras3::keras_model_sequential(input_shape = job$features)
  model <- keras3::layer_dense(
    model,
    units = job$units,
    activation = "relu",
    kernel_initializer = kernel(job$kernel_seeds[[1]])
  )
  model <- keras3::layer_dense(
    model,
    units = job$classes,
    kernel_initializer = kernel(job$kernel_seeds[[2]])
  )
  keras3::compile(
    model,
    optimizer = keras3::optimizer_sgd(job$learning_rate),
    loss = keras3::loss_sparse_categorical_crossentropy(from_logits = TRUE),
    metrics = "accuracy"
  )
  model
}
