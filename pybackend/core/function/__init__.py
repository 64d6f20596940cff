"""Calls of functions and scripts in a worker, and what they share. Start with `call.py`."""
