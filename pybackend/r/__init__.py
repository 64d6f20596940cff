"""Functions written in R, which the workers run in the process of TensorFlow."""
