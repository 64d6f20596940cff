"""Rows: from arrays, DataFrames and MNIST into one shard per worker."""
