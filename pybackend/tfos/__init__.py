"""The names of TensorFlowOnSpark, so that its users change an import.

Modules and names are spelled as there; what they do is done by the rest of this package.
"""
