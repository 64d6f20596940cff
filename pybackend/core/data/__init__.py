"""Training data: arrays, DataFrames, files and MNIST, sharded across the workers."""
