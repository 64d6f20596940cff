"""Everything that knows Spark."""
