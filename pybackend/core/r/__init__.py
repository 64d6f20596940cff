"""Functions written in R, which the workers run in TensorFlow's process."""
