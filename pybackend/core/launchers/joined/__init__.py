"""Worker groups of processes that users start themselves and that make the same call."""
