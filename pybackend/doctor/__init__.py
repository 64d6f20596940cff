"""Checks of this machine and of a cluster: versions, hardware, network, and what is missing."""
