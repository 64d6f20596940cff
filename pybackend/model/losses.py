"""Losses that can be averaged over workers: means over rows, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from pybackend.errors import InputError
from pybackend.model.layers import find_layers, flatten

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
                "sees only its own"
            )
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in _MEANS:
            name = getattr(loss, "name", type(loss).__name__)
            raise InputError(
                f"the loss {name!r} has reduction={reduction!r}: workers average gradients by "
                "their rows, so use reduction='sum_over_batch_size'"
            )


def check_loss_is_mean(model: Any, rows: Sequence[Any]) -> None:
    """Reject a loss that is not a mean over rows by trying it on two.

    A mean over two rows is the mean of what each gives by itself. Sums are not, nor are losses
    that compare the rows of a batch, wherever they come from: the loss, `add_loss`, an activity
    regularizer, a custom `compute_loss`.

    Parameters
    ----------
    rows
        Two data sets (x, y) or (x, y, sample_weight) of one row each.

    Raises
    ------
    InputError
        Shows the three values.
    """
    both = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *rows)
    apart = [_compute_loss(model, *row) for row in rows]
    together = _compute_loss(model, *both)
    expected = sum(apart) / len(apart)
    # Half precision rounds at the third digit.
    is_half = any("16" in str(layer.compute_dtype) for layer in find_layers(model))
    bound = (0.01 if is_half else 1e-4) * max(abs(together), abs(expected), 1e-3)
    if abs(together - expected) > bound:
        raise InputError(
            f"the loss of two rows is {together:.6g}, but {apart[0]:.6g} and {apart[1]:.6g} for "
            "each by itself: it is not a mean over the rows of a batch, so it cannot be averaged "
            "over workers. Return one value per row from a loss (leave out the axis 0), and give "
            "`add_loss` a mean"
        )


def _compute_loss(model: Any, x: Any, y: Any, sample_weight: Any = None) -> float:
    y_pred = model(x, training=False)
    arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
    if "training" in inspect.signature(model.compute_loss).parameters:
        arguments["training"] = False
    return float(model.compute_loss(**arguments))
