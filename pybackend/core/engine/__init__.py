"""Training in one worker: Keras's own ``fit``, with exact results over all workers."""
