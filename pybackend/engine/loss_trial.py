"""Tries on some rows whether the loss of an evaluation can be averaged over workers.

A mean over rows is what parts of them give, weighted by the parts' rows. Sums are not, nor are
losses that compare the rows of a batch, wherever they come from: the loss, `add_loss`, an activity
regularizer, a custom `compute_loss`. Whether that of a training can, its audit says.
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

# How far a prediction may be off by rounding, in full and half precision, as a part of the largest.
_MIXED = (1e-3, 0.05)
# Where the rows are cut into parts, as shares of them. What a ratio of sums differs by grows with
# the number of parts.
_PARTS = (0.03, 0.06, 0.12, 0.25, 0.5)


def is_mean_in_evaluation(model: Any, rows: Any) -> bool:
    """Whether the loss of an evaluation is a mean over rows.

    Tried are parts of several sizes, at predictions that are moved at random: those of a model that
    is not yet trained are too much alike. The model is as it was afterwards.

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
        except Exception:  # such as a model that computes nothing to compare outside of training
            return True
    if not np.isfinite(whole):
        return True
    parts = sum((p.stop - p.start) / loss.count * v for p, v in zip(cut, values, strict=True))
    # Half precision rounds at the third digit.
    bound = (0.01 if _is_half(model) else 3e-5) * max(1e-3, *map(abs, [whole, *values]))
    return bool(abs(parts - whole) <= bound)  # NaN is not less than anything


def mixes_rows(model: Any, rows: Any) -> bool:
    """Whether a prediction depends on the other rows of its batch.

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
        except Exception:  # the evaluation will say why
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
    """The loss of all rows, at predictions that are moved if it allows that."""
    everything = slice(0, loss.count)
    with suppress(Exception):  # an assertion about predictions, say
        total = loss(everything)
        if np.isfinite(total):
            return total
    loss.amount = 0.0  # what was moved may be no prediction of this model
    return loss(everything)


class _LossOfParts:
    """The loss of parts of the rows; ``amount`` is how far predictions are moved."""

    def __init__(self, model: Any, rows: Any) -> None:
        self.count = count_rows(rows)
        self.amount = 1.0
        self._model = model
        self._rows = rows
        self._moves: list[Callable[[Any, slice], Any]] | None = None
        # What counts its calls is to give each part the same.
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
    """How to move predictions at random, so that probabilities and rates stay what they are."""
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
    """Uneven parts, each of at least one row, that end at shares of the rows."""
    ends = {max(1, round(share * count)) for share in shares}
    bounds = sorted({0, *(end for end in ends if end < count), count})
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def take_part(rows: Any, part: slice) -> Any:
    """Some of the rows, as tensors."""
    return keras.tree.map_structure(lambda array: tf.convert_to_tensor(array[part]), rows)


def count_rows(rows: Any) -> int:
    """Number of rows."""
    return len(keras.tree.flatten(rows)[0])
