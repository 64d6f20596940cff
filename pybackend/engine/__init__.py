"""Training inside one worker: Keras's own ``fit``, made exact over all workers."""
