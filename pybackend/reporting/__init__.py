"""The report of a training: one HTML page."""
