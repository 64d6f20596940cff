"""Feed running functions: rows go from Spark tasks to the workers, and results come back."""
