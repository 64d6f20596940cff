"""Calls to a user's function in a worker, and its communication with the other workers."""
