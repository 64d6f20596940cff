"""Tuning: many training runs at once, and stopping those that are worse than others."""
