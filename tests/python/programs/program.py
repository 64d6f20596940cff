"""A program of the tests: a model, its rows, and the expected result of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
from replicas import Case

from pybackend.core.job.worker_options import Exchange

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
GLOBAL = {"exchange": Exchange(loss_over="global batch")}


@dataclass
class Program(Case):
    """A small model in the style of one of Keras's code examples, and its rows."""

    batch_size: int = 4
    tolerance: float = 1e-5
    lines: int = 1
    """Changed lines when the example's program trains on several workers."""
    is_random: bool = False
    """Workers draw random numbers, or normalize by their own rows."""
    error: str | None = None
    """Part of the message that ends the training."""


def compiled(model: Any, loss: Any = LOGITS, optimizer: Any = "adam", **options: Any) -> Any:
    """Compile the model, and return it."""
    model.compile(optimizer, loss, **options)
    return model
