"""API of TensorFlowOnSpark, so that its users only change an import.

Modules and names are spelled as there; the rest of this package implements them.
"""
