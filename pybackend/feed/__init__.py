"""Rows on their way into a function that runs: from Spark's tasks to the workers, and back."""
