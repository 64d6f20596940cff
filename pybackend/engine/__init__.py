"""Training inside one worker: Keras's own ``fit``, exact over all workers."""
