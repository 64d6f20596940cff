"""Worker groups on hosts that are reachable by ssh."""
