"""Losses, metrics and normalization over the rows of all workers. Start with `global_batch.py`."""
