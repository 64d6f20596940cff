"""Gangs on hosts that ssh reaches."""
