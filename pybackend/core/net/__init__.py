"""Connections between the processes of one job."""
