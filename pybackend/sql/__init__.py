"""Trained models as SQL: queries that compute a network's predictions, and their deployment."""
