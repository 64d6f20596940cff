"""The report of a training run: one HTML page."""
