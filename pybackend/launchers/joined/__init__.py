"""Gangs of processes that make the same call, each started by the user."""
