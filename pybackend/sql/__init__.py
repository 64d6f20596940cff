"""Trained models as SQL: queries that compute what a network computes, and their deployment."""
