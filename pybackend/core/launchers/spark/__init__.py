"""Launchers and helpers for Apache Spark."""
