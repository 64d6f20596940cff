"""Functions written in R: sent to the workers, and run there in the process of TensorFlow."""
