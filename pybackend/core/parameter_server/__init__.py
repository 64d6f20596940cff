"""Training on TensorFlow's parameter servers, in a worker. Start with `process.py`."""
