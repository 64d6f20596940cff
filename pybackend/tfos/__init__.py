"""API of TensorFlowOnSpark, so that its users only have to change an import.

Modules and names are spelled as they are there; the rest of this package implements them.
"""
