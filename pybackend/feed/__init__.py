"""Feeding of running functions: rows from Spark tasks to the workers, and results back."""
