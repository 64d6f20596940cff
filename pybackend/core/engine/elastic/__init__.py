"""Elastic training; start with `generations`."""
