"""Check, on some rows, that the loss of an evaluation can be averaged over workers.

A mean over rows equals the mean over parts of them, weighted by the parts' rows. Sums do not, nor
do losses that compare the rows of a batch: in the loss, `add_loss`, an activity regularizer or a
custom `compute_loss`. The loss of a training is checked by its audit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.engine.noise import stand_in_noise
from pybackend.engine.traced_loops import trace_loops
from pybackend.model.behavior import compute_loss, keep_state
from pybackend.model.layers import find_layers

# Tolerance for rounding of a prediction, in full and half precision, relative to the largest.
_MIXED = (1e-3, 0.05)
# Positions at which the rows are cut into parts, as shares of them. The deviation of a ratio of
# sums grows with the number of parts.
_PARTS = (0.03, 0.06, 0.12, 0.25, 0.5)


def is_mean_in_evaluation(model: Any, rows: Any) -> bool:
    """Return whether the loss of an evaluation is a mean over rows.

    The check uses parts of several sizes, and predictions with random changes: those of a model
    that is not yet trained are too similar. Afterwards the model's state is restored.

    Parameters
    ----------
    rows
        ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of at least two rows.
    """
    with keep_state(model), trace_loops(model), stand_in_noise():
        loss = _LossOfParts(model, rows)
        try:
            whole = _compute_total(loss)
            cut = cut_rows(loss.count, _PARTS)
            values = [loss(part) for part in cut]
        except Exception:  # such as a model without a loss outside of training
            return True
    if not np.isfinite(whole):
        return True
    parts = sum((p.stop - p.start) / loss.count * v for p, v in zip(cut, values, strict=True))
    # Half precision rounds at the third digit.
    bound = (0.01 if _is_half(model) else 3e-5) * max(1e-3, *map(abs, [whole, *values]))
    return bool(abs(parts - whole) <= bound)  # NaN is not less than anything


def mixes_rows(model: Any, rows: Any) -> bool:
    """Return whether a prediction depends on the other rows of its batch.

    Parameters
    ----------
    rows
        As in `is_mean_in_evaluation`.
    """
    with keep_state(model), trace_loops(model), stand_in_noise():
        try:
            x = keras.utils.unpack_x_y_sample_weight(rows)[0]
            count = count_rows(rows)
            whole = _predict(model, take_part(x, slice(0, count)))
            parts = [_predict(model, take_part(x, part)) for part in cut_rows(count, _PARTS)]
        except Exception:  # the evaluation will report it
            return False
    bound = _MIXED[_is_half(model)]
    for leaf, *pieces in zip(whole, *parts, strict=True):
        if leaf.ndim and len(leaf) == count and leaf.dtype.kind == "f":
            size = float(np.abs(leaf[np.isfinite(leaf)]).max(initial=1e-3))
            distance = np.abs(np.concatenate(pieces) - leaf)
            if float(distance[np.isfinite(distance)].max(initial=0)) > bound * size:
                return True
    return False


def _is_half(model: Any) -> bool:
    return any("16" in str(layer.compute_dtype) for layer in find_layers(model))


def _predict(model: Any, x: Any) -> list[Any]:
    leaves = keras.tree.flatten(model(x, training=False))
    return [np.asarray(keras.ops.convert_to_numpy(leaf)) for leaf in leaves]


def _compute_total(loss: _LossOfParts) -> float:
    """Return the loss of all rows, at changed predictions if the loss accepts them."""
    everything = slice(0, loss.count)
    with suppress(Exception):  # e.g. an assertion about predictions
        total = loss(everything)
        if np.isfinite(total):
            return total
    loss.amount = 0.0  # changed predictions may be impossible for this model
    return loss(everything)


class _LossOfParts:
    """Loss of parts of the rows; predictions are changed unless ``amount`` is zero."""

    def __init__(self, model: Any, rows: Any) -> None:
        self.count = count_rows(rows)
        self.amount = 1.0
        self._model = model
        self._rows = rows
        self._moves: list[Callable[[Any, slice], Any]] | None = None
        # Layers that count their calls must treat each part alike.
        self._before = [(v, v.numpy()) for v in model.non_trainable_variables]

    def __call__(self, part: slice) -> float:
        for variable, value in self._before:
            variable.assign(value)
        rows = take_part(self._rows, part)
        x = keras.utils.unpack_x_y_sample_weight(rows)[0]
        y_pred = self._model(x, training=False)
        if self._moves is None:  # the first call is for all rows
            generator = np.random.default_rng(0)
            leaves = keras.tree.flatten(y_pred)
            self._moves = [choose_move(leaf, self.count, generator) for leaf in leaves]
        if self.amount:
            leaves = keras.tree.flatten(y_pred)
            moved = [move(leaf, part) for move, leaf in zip(self._moves, leaves, strict=True)]
            y_pred = keras.tree.pack_sequence_as(y_pred, moved)
        return float(compute_loss(self._model, rows, y_pred, training=False))


def choose_move(
    predictions: Any, count: int, generator: np.random.Generator
) -> Callable[[Any, slice], Any]:
    """Return a function that changes predictions at random, but keeps probabilities valid."""
    shape = tuple(predictions.shape)
    type_name = keras.backend.standardize_dtype(predictions.dtype)
    if not shape or shape[0] != count or not keras.backend.is_float_dtype(type_name):
        return lambda leaf, part: leaf
    values = keras.ops.convert_to_numpy(predictions).astype("float32")
    is_share = bool(values.min() >= 0 and values.max() <= 1)
    is_distribution = is_share and len(shape) > 1 and shape[-1] > 1
    is_distribution = is_distribution and np.allclose(values.sum(axis=-1), 1, atol=1e-2)
    noise: Any
    if is_distribution:
        noise = generator.dirichlet(np.ones(shape[-1]), shape[:-1])
    elif is_share:
        noise = generator.uniform(0.01, 0.99, shape)
    elif values.min() >= 0:
        noise = np.exp(generator.normal(size=shape))
    else:
        noise = generator.standard_normal(shape, "float32") * max(1.0, float(values.std()))
    if is_share:
        return lambda leaf, part: 0.5 * leaf + (0.5 * noise[part]).astype(type_name)
    if values.min() >= 0:
        return lambda leaf, part: (leaf + 0.1) * noise[part].astype(type_name)
    return lambda leaf, part: leaf + noise[part].astype(type_name)


def cut_rows(count: int, shares: Sequence[float]) -> list[slice]:
    """Return uneven parts, each of at least one row, that end at these shares of the rows."""
    ends = {max(1, round(share * count)) for share in shares}
    bounds = sorted({0, *(end for end in ends if end < count), count})
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def take_part(rows: Any, part: slice) -> Any:
    """Return some of the rows, as tensors."""
    return keras.tree.map_structure(lambda array: tf.convert_to_tensor(array[part]), rows)


def count_rows(rows: Any) -> int:
    """Return the number of rows."""
    return len(keras.tree.flatten(rows)[0])
