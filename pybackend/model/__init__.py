"""Serialization, comparison and checks of models, without training them."""
