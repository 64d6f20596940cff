"""Calling a user's function in a worker, and what it can do together with the other workers."""
