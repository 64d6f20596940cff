"""Losses that can be averaged over workers: means over rows, and nothing else."""

from __future__ import annotations

from typing import Any

import keras

from pybackend.errors import InputError
from pybackend.model.layers import flatten

_MEANS = ("sum_over_batch_size", "mean")


def check_losses(model: Any) -> None:
    """Reject losses that are known not to be means over rows.

    Raises
    ------
    InputError
        Names the loss and what to use instead.
    """
    for loss in flatten(model.loss):
        if isinstance(loss, keras.losses.Circle):
            raise InputError(
                "the loss Circle compares the rows of a batch with each other, of which a worker "
                "sees only its own: give `exchange` the option loss_over='global batch'"
            )
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in _MEANS:
            name = getattr(loss, "name", type(loss).__name__)
            raise InputError(
                f"the loss {name!r} has reduction={reduction!r}: workers average gradients by "
                "their rows, so use reduction='sum_over_batch_size', or give `exchange` the option "
                "loss_over='global batch'"
            )
