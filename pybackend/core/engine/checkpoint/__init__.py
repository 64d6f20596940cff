"""State of a training run, and its checkpoints; start with `checkpointing`."""
