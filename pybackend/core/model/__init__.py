"""Serialize, compare and check models, without training them."""
