"""Gangs that Slurm starts."""
