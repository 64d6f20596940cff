"""Looking at a model, never training it."""
