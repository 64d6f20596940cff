"""Tries on some rows whether a model's loss can be averaged over workers.

A mean over rows is what parts of them give, weighted by the parts' rows. Sums are not, nor are
losses that compare the rows of a batch, wherever they come from: the loss, `add_loss`, an activity
regularizer, a custom `compute_loss` or `train_step`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.engine.overrides import override
from pybackend.engine.steps import has_keras_train_step
from pybackend.engine.traced_loops import trace_loops
from pybackend.errors import InputError
from pybackend.model.behavior import compute_loss, keep_state
from pybackend.model.compare import is_random_state
from pybackend.model.layers import find_layers, find_other_optimizers

# Where the rows are cut into parts, as shares of them. What a ratio of sums differs by grows with
# the number of parts.
_PARTS = (0.03, 0.06, 0.12, 0.25, 0.5)
FEW_PARTS = (0.3,)
# A loss that is random is drawn so often, and rejected if the mean over its parts is off by so many
# standard errors.
_DRAWS = 6
_ERRORS = 15.0
# Of a gradient so many values are compared, evenly spread.
_MOST_VALUES = 10_000
_WAYS_OUT = (
    "it is not a mean over the rows of a batch, so it cannot be averaged over workers. For a loss "
    "of outputs and labels give `exchange` the option loss_over='global batch', which computes it "
    "from the rows of all workers. Or return one value per row from the loss (leave out the axis "
    "0); `add_loss` needs a mean"
)
_WAYS_OUT_OF_STEPS = (
    "the model's `train_step` makes something of the rows of a batch together, of which a worker "
    "sees only its own: a loss that compares or sums rows (compute it in `compute_loss`, and give "
    "`exchange` the option loss_over='global batch'), or gradients that it clips by itself (give "
    "`clipnorm` to the optimizer instead)"
)


def check_loss_is_mean(model: Any, rows: Any) -> None:
    """Reject a model whose loss is not a mean over rows.

    Tried are parts of several sizes, in training and, if that is random, in evaluation, at
    predictions that are moved at random: those of a model that is not yet trained are too much
    alike. Of a model with its own ``train_step`` the gradients are compared. What differs from
    itself is random, and rejected only if its mean over some draws differs.

    Parameters
    ----------
    model
        Is as it was afterwards, but for generators of random numbers that are not Keras's.
    rows
        ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of at least two rows.

    Raises
    ------
    InputError
        Shows the values that differ, or says that the loss is not a number.
    """
    with keep_state(model), hold_statistics(model), trace_loops(model):
        if has_keras_train_step(model):
            # Keras fits the loss to the first outputs, which are to be those of a training.
            if not _try_loss(model, rows, training=True):
                _try_loss(model, rows, training=False)
        else:
            _try_step(model, rows)


def is_mean_in_evaluation(model: Any, rows: Any) -> bool:
    """Whether the loss of an evaluation is a mean over rows, as `check_loss_is_mean` tries it."""
    try:
        with keep_state(model), trace_loops(model):
            _try_loss(model, rows, training=False)
    except InputError:
        return False
    return True


def _try_loss(model: Any, rows: Any, training: bool) -> bool:
    """Returns whether that is certain: a loss that is random may hide a small difference."""
    loss = _LossOfParts(model, rows, training)
    total = _compute_total(loss)
    if total is None:
        return False
    if not np.isfinite(total):
        # A loss-scaling optimizer expects that numbers overflow.
        if not training or isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            return False
        raise InputError(
            f"the loss of {loss.count} of the rows is {total}, so it cannot be tried whether it "
            "may be averaged over the workers: look for NaN and infinity in the features, labels "
            "and weights, and for a loss that divides by 0"
        )
    try:
        found = find_difference(loss, loss.count, model)
    except Exception:  # of fewer rows: the training will show it
        return False
    if found.differs:
        cut, whole, parts = found.cut, found.whole, found.parts
        sizes = ", ".join(str(part.stop - part.start) for part in cut)
        raise InputError(
            f"the loss of {loss.count} rows in {'training' if training else 'evaluation'} is "
            f"{whole:.6g}, but the mean over parts of {sizes} rows is {parts:.6g}: {_WAYS_OUT}"
        )
    return not found.is_random


def _compute_total(loss: _LossOfParts) -> float | None:
    """The loss of all rows, at predictions that are moved if it allows that; None if it fails."""
    everything = slice(0, loss.count)
    with suppress(Exception):  # an assertion about predictions, say
        total = loss(everything)
        if np.isfinite(total):
            return total
    loss.amount = 0.0  # what was moved may be no prediction of this model
    try:
        return loss(everything)
    except Exception:  # such as a model that computes nothing to compare outside of training
        return None


def _try_step(model: Any, rows: Any) -> None:
    """As `_try_loss`, with the gradients that a custom train_step gives to the optimizer."""

    def gradients(part: slice) -> Any:
        return compute_step_gradients(model, take_part(rows, part))

    count = count_rows(rows)
    try:
        found = find_difference(gradients, count, model)
    except Exception:  # what it cannot do here, such as what needs a graph, shows in the training
        return
    if found.differs:
        raise InputError(
            f"the gradients of {count} rows are not the mean of those of parts of them: "
            f"{_WAYS_OUT_OF_STEPS}"
        )


def compute_step_gradients(model: Any, data: Any) -> Any:
    """Some values of what a train_step gives to the optimizer, as one array."""
    taken: list[Any] = []

    def take(grads: Any, trainable_variables: Any = None) -> None:
        flat = [keras.ops.convert_to_numpy(g).ravel() for g in grads if g is not None]
        taken.extend(values[:: 1 + len(values) // _MOST_VALUES] for values in flat)

    with ExitStack() as stack:
        for optimizer in [model.optimizer, *find_other_optimizers(model).values()]:
            stack.enter_context(override(optimizer, "apply", take))
            # A scale is to find out when numbers overflow.
            stack.enter_context(override(optimizer, "scale_loss", lambda loss: loss))
        model.train_step(data)
    return np.concatenate(taken) if taken else np.zeros(0)


@dataclass(frozen=True)
class _Comparison:
    """What a function gives for all rows, and the mean of what it gives for parts of them."""

    cut: list[slice]
    whole: Any
    parts: Any
    differs: bool
    is_random: bool


def find_difference(
    function: Callable[[slice], Any],
    count: int,
    model: Any,
    shares: Sequence[float] = _PARTS,
    prepare: Callable[[Sequence[slice]], None] = lambda cut: None,
) -> _Comparison:
    """Compare a function of all rows, which may be random, with its mean over parts of them.

    Parameters
    ----------
    shares
        Where the rows are cut.
    prepare
        Called with all parts, before the function is called with each.
    """
    # Half precision rounds at the third digit.
    is_half = any("16" in str(layer.compute_dtype) for layer in find_layers(model))
    exactness = 0.01 if is_half else 3e-5
    everything = [slice(0, count)]
    seeds = [v for v in model.variables if is_random_state(v)]
    before = [v.numpy() for v in seeds]

    def reset(part: slice) -> Any:
        for seed, state in zip(seeds, before, strict=True):
            seed.assign(state)
        return function(part)

    def draw(cut: Sequence[slice]) -> Any:
        prepare(cut)
        return _weigh(cut, [function(part) for part in cut])

    # The same draws for all parts, if what is drawn is not drawn for each row.
    prepare(everything)
    whole, again = reset(everything[0]), function(everything[0])
    cut = cut_rows(count, shares)
    prepare(cut)
    values = [reset(part) for part in cut]
    parts = _weigh(cut, values)
    bound = exactness * max(1e-3, *map(_norm, [whole, *values]))
    is_random = _norm(again - whole) > 0.1 * bound or any(
        not np.array_equal(v.numpy(), state) for v, state in zip(seeds, before, strict=True)
    )
    if is_random and not _norm(parts - whole) <= bound:
        cut = cut_rows(count, FEW_PARTS)
        draws = []
        for number in range(_DRAWS):  # turn and turn about: what counts its calls does so for both
            order = (everything, cut) if number % 2 else (cut, everything)
            found = [draw(each) for each in order]
            draws.append(found if number % 2 else found[::-1])
        pairs = np.array(draws)
        whole, parts = pairs.mean(axis=0)
        error = _norm((pairs[:, 1] - pairs[:, 0]).std(axis=0, ddof=1)) / np.sqrt(_DRAWS)
        bound = max(_ERRORS * error, 0.05 * _norm(whole), 1e-3 * exactness)
    differs = not _norm(parts - whole) <= bound  # NaN is not less than anything
    return _Comparison(cut, whole, parts, differs, is_random)


def _norm(value: Any) -> float:
    return float(np.linalg.norm(np.atleast_1d(value)))


class _LossOfParts:
    """The loss of parts of the rows; ``amount`` is how far predictions are moved."""

    def __init__(self, model: Any, rows: Any, training: bool) -> None:
        self.count = count_rows(rows)
        self.amount = 1.0
        self._model = model
        self._rows = rows
        self._training = training
        self._moves: list[Callable[[Any, slice], Any]] | None = None

    def __call__(self, part: slice) -> float:
        rows = take_part(self._rows, part)
        x = keras.utils.unpack_x_y_sample_weight(rows)[0]
        y_pred = self._model(x, training=self._training)
        if self._moves is None:  # the first call is for all rows
            generator = np.random.default_rng(0)
            leaves = keras.tree.flatten(y_pred)
            self._moves = [choose_move(leaf, self.count, generator) for leaf in leaves]
        if self.amount:
            leaves = keras.tree.flatten(y_pred)
            moved = [move(leaf, part) for move, leaf in zip(self._moves, leaves, strict=True)]
            y_pred = keras.tree.pack_sequence_as(y_pred, moved)
        return float(compute_loss(self._model, rows, y_pred, self._training))


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


def _weigh(cut: Sequence[slice], values: Sequence[Any]) -> Any:
    """The mean of what parts give, weighted by their rows."""
    total = cut[-1].stop
    return sum(
        (part.stop - part.start) / total * value for part, value in zip(cut, values, strict=True)
    )


def take_part(rows: Any, part: slice) -> Any:
    return keras.tree.map_structure(lambda array: tf.convert_to_tensor(array[part]), rows)


def count_rows(rows: Any) -> int:
    return len(keras.tree.flatten(rows)[0])


@contextmanager
def hold_statistics(model: Any) -> Iterator[None]:
    """Keep batch normalization to its moving statistics.

    Those of a batch are each worker's own, which is documented.
    """
    normalizing = [
        layer
        for layer in find_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]
    flags = [(v, v.trainable) for layer in normalizing for v in layer.variables]
    for layer in normalizing:
        layer.trainable = False
    try:
        yield
    finally:
        for layer in normalizing:
            layer.trainable = True
        for variable, flag in flags:
            variable.trainable = flag
