"""Training in one worker: Keras's own ``fit``, exact over all workers; start with `train`."""
