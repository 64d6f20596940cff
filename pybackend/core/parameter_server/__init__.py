"""Training under TensorFlow's own distribution strategies, in a worker."""
