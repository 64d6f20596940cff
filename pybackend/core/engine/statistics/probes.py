"""Checks on a few rows: whether metrics and losses can be combined over workers.

A mean over rows equals the mean over parts, weighted by their numbers of rows. This does not hold
for sums, or for losses that compare the rows of a batch, whether in the loss, `add_loss`, an
activity regularizer or a custom `compute_loss`. The loss used in training is checked by the audit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_sum
from pybackend.core.data.arrays import nest
from pybackend.core.data.rows import Rows
from pybackend.core.engine.audit.stand_ins import stand_in_noise, trace_loops
from pybackend.core.engine.statistics.global_batch import OverBatch, find_compiled_metrics
from pybackend.core.errors import InputError
from pybackend.core.job.job import ModelJob
from pybackend.core.job.messages import Emit, Note
from pybackend.core.job.worker_options import LocalSteps
from pybackend.core.model.checks import check_masks
from pybackend.core.model.compare import compute_loss, keep_state
from pybackend.core.model.view import ModelView, flatten, has_own

# Means over rows, or over their time steps.
_ACCURACIES = (
    keras.metrics.BinaryAccuracy,
    keras.metrics.CategoricalAccuracy,
    keras.metrics.SparseCategoricalAccuracy,
)
# Tolerance for rounding of a prediction, in full and half precision, relative to the largest.
_MIXED = (1e-3, 0.05)
# Positions at which the rows are cut into parts, as shares of them: for metrics, and for losses and
# predictions. The deviation of a ratio of sums grows with the number of parts.
_SHARES, _PARTS = (0.1, 0.35), (0.03, 0.06, 0.12, 0.25, 0.5)
_ABOUT_TEST_STEP = (
    "the model has its own test_step: its results are averaged over the workers, weighted by "
    "rows, which is correct only for means over rows"
)
_ABOUT_MIXING = (
    "a layer combines the rows of a batch outside of training too: predictions and evaluation "
    "metrics depend on each worker's own batches"
)
_MOST_TRIED = 32
# Rows to check for a small model and small rows, even if a step has fewer.
_LEAST_TRIED = 8
_LARGE_ROW_BYTES = 1 << 20
_LARGE_MODEL = 10_000_000

# Result of the check whether the state of the metrics of `compile` may be summed over workers.
MetricsKind = Literal["sums", "not sums", "unknown"]


def choose_rows(model: Any, rows: Rows, job: ModelJob) -> Any:
    """Return some finite rows, at most about one step's worth; None if there are none."""
    count = len(rows)
    if not count:
        return None
    parameters = sum(int(np.prod(weight.shape)) for weight in model.weights)
    is_small = rows.row_bytes < _LARGE_ROW_BYTES and parameters < _LARGE_MODEL
    most = max(_LEAST_TRIED if is_small else 2, min(job.batch_size, _MOST_TRIED))
    generator = np.random.default_rng(job.seed)
    chosen = np.sort(generator.choice(count, min(count, most), replace=False))
    found, is_finite = rows.take(chosen), np.ones(len(chosen), bool)
    for column in found.values():
        if column.dtype.kind == "f":  # only the training uses other numbers
            is_finite &= np.isfinite(column.reshape(len(column), -1)).all(axis=1)
    if not is_finite.any():
        return None
    # A single row is repeated, to have two parts.
    finite = np.resize(np.flatnonzero(is_finite), max(2, is_finite.sum()))
    return nest({key: column[finite] for key, column in found.items()})


def probe_metrics(model: Any, rows: Any, job: ModelJob, collective: Collective) -> MetricsKind:
    """Check the metrics on every worker's rows; the result is the same on all workers."""
    if job.workers == 1 or isinstance(job.exchange, LocalSteps):
        return "unknown"
    try:
        outcome = [0, 0] if rows is None else [0, bool(find_unsummable_metrics(model, rows))]
    except Exception:  # metrics that reject such rows; the training will report real errors
        outcome = [1, 0]
    failed, unsummable = all_sum(collective, outcome)
    return "unknown" if failed else "not sums" if unsummable else "sums"


def find_unsummable_metrics(model: Any, rows: Any) -> list[str]:
    """Return the names of metrics whose value over all rows differs from that of summed parts.

    Counts and sums can be summed over workers. Maxima and correlations cannot, and neither can
    values that are computed from a whole batch and then averaged over batches. The metrics passed
    to ``compile`` are checked, with predictions that are changed at random. Afterwards the model's
    state is restored, but its metrics have been built and reset. ``rows`` is ``(x, y)`` or ``(x, y,
    sample_weight)`` of at least two rows.
    """
    containers = find_compiled_metrics(model)
    if not containers:
        return []
    count = count_rows(rows)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(rows)
    if _may_have_only_accuracy(model):
        for container in containers:
            if not container.built:
                container.build(y, model.outputs[0])
        if all(type(metric) in _ACCURACIES for one in containers for metric in one.metrics):
            return []
    generator = np.random.default_rng(0)
    with keep_state(model):
        y_pred = keras.tree.map_structure(
            lambda leaf: choose_move(leaf, count, generator)(leaf, slice(0, count)),
            model(take_part(x, slice(0, count)), training=False),
        )
        given = [y, y_pred, *([] if weight is None else [weight])]
        return [name for one in containers for name in _find_unsummable(one, given, count)]


def _may_have_only_accuracy(model: Any) -> bool:
    """Return whether a model has one output of Keras, and seems to have no metric but "accuracy".

    Keras chooses the metric's class by the shapes of labels and output.
    """
    try:
        given = model.get_compile_config() or {}
    except Exception:  # a loss without a configuration
        return False
    names = flatten([given.get("metrics"), given.get("weighted_metrics")])
    outputs = getattr(model, "outputs", None) or []
    is_known = bool(names) and {"accuracy", "acc"}.issuperset(map(str, names))
    is_plain = is_known and len(outputs) == 1 and not has_own(model, "call")
    return is_plain and len(outputs[0].shape) > 1 and outputs[0].shape[-1] is not None


def _find_unsummable(container: Any, arguments: Sequence[Any], count: int) -> list[str]:
    def read_state(part: slice) -> list[Any]:
        container.reset_state()
        container.update_state(*take_part(arguments, part))
        return [variable.numpy().astype(np.float64) for variable in container.variables]

    read_state(slice(0, count))
    expected = _read_result(container)
    try:
        states = [read_state(part) for part in cut_rows(count, _SHARES)]
    except Exception:  # a metric that needs more rows than a part has depends on the batch
        container.reset_state()
        return list(expected)
    for variable, *values in zip(container.variables, *states, strict=True):
        variable.assign(np.sum(values, axis=0))
    found = _read_result(container)
    container.reset_state()
    return [name for name, value in expected.items() if not _is_close(value, found[name])]


def _read_result(container: Any) -> dict[str, Any]:
    # A copy, because a metric may return its variable.
    return {n: np.array(keras.ops.convert_to_numpy(v)) for n, v in container.result().items()}


def _is_close(one: Any, other: Any) -> bool:
    return bool(np.allclose(other, one, rtol=1e-3, atol=1e-5, equal_nan=True))


def find_over(
    view: ModelView, rows: Any, kind: MetricsKind, job: ModelJob, collective: Collective, emit: Emit
) -> OverBatch:
    """Return which values an evaluation must compute from all workers' rows, instead of as sums."""
    if job.workers == 1:
        return OverBatch()
    if has_own(view.model, "test_step"):
        emit(Note(_ABOUT_TEST_STEP))
    needs = True
    if view.has_masked_loss:
        with suppress(InputError):  # else it can be averaged, weighted by unmasked steps
            check_masks(view)
            needs = False
    else:
        needs = rows is not None and not is_mean_in_evaluation(view, rows)
    mixes = rows is not None and mixes_rows(view, rows)
    needs, mixes = (bool(count) for count in all_sum(collective, [needs, mixes]))
    if mixes:
        emit(Note(_ABOUT_MIXING))
    return OverBatch(loss=needs, metrics=kind == "not sums")


def is_mean_in_evaluation(view: ModelView, rows: Any) -> bool:
    """Return whether the loss in an evaluation is a mean over rows.

    The check uses parts of several sizes, and predictions with random changes, because the
    predictions of an untrained model are too similar. Afterwards the model's state is restored.
    ``rows`` is ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of at least two rows.
    """
    model = view.model
    with keep_state(model), trace_loops(view), stand_in_noise():
        loss = _LossOfParts(model, rows)
        cut = cut_rows(loss.count, _PARTS)
        try:
            whole, values = _compute_total(loss), [loss(part) for part in cut]
        except Exception:  # such as a model without a loss outside of training
            return True
    if not np.isfinite(whole):
        return True
    parts = sum((p.stop - p.start) / loss.count * v for p, v in zip(cut, values, strict=True))
    # Half precision rounds at the third digit.
    bound = (0.01 if view.has_half_layers else 3e-5) * max(1e-3, *map(abs, [whole, *values]))
    return bool(abs(parts - whole) <= bound)  # NaN is not less than anything


def mixes_rows(view: ModelView, rows: Any) -> bool:
    """Return whether a prediction depends on the other rows of its batch; ``rows`` as above."""
    model = view.model
    with keep_state(model), trace_loops(view), stand_in_noise():
        try:
            x = keras.utils.unpack_x_y_sample_weight(rows)[0]
            count = count_rows(rows)
            whole = _predict(model, take_part(x, slice(0, count)))
            parts = [_predict(model, take_part(x, part)) for part in cut_rows(count, _PARTS)]
        except Exception:  # the evaluation will report it
            return False
    bound = _MIXED[view.has_half_layers]
    return any(
        leaf.ndim
        and len(leaf) == count
        and leaf.dtype.kind == "f"
        and _find_largest(np.concatenate(pieces) - leaf) > bound * max(1e-3, _find_largest(leaf))
        for leaf, *pieces in zip(whole, *parts, strict=True)
    )


def _find_largest(values: Any) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0))


def _predict(model: Any, x: Any) -> list[Any]:
    leaves = keras.tree.flatten(model(x, training=False))
    return [np.asarray(keras.ops.convert_to_numpy(leaf)) for leaf in leaves]


def _compute_total(loss: _LossOfParts) -> float:
    """Return the loss of all rows, with changed predictions if the loss accepts them."""
    everything = slice(0, loss.count)
    with suppress(Exception):  # e.g. an assertion about predictions
        total = loss(everything)
        if np.isfinite(total):
            return total
    loss.amount = 0.0  # changed predictions may be impossible for this model
    return loss(everything)


class _LossOfParts:
    """Loss computed on parts of the rows; predictions are changed unless ``amount`` is zero."""

    def __init__(self, model: Any, rows: Any) -> None:
        self.count, self.amount = count_rows(rows), 1.0
        self._model, self._rows = model, rows
        self._moves: list[Callable[[Any, slice], Any]] | None = None
        # Layers that count their calls must treat each part alike.
        self._before = [(v, v.numpy()) for v in model.non_trainable_variables]

    def __call__(self, part: slice) -> float:
        for variable, value in self._before:
            variable.assign(value)
        rows = take_part(self._rows, part)
        x = keras.utils.unpack_x_y_sample_weight(rows)[0]
        y_pred = self._model(x, training=False)
        leaves = keras.tree.flatten(y_pred)
        if self._moves is None:  # the first call is for all rows
            generator = np.random.default_rng(0)
            self._moves = [choose_move(leaf, self.count, generator) for leaf in leaves]
        if self.amount:
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
    noise: Any
    if values.min() >= 0 and values.max() <= 1:
        has_classes = len(shape) > 1 and shape[-1] > 1
        if has_classes and np.allclose(values.sum(axis=-1), 1, atol=1e-2):
            noise = generator.dirichlet(np.ones(shape[-1]), shape[:-1])
        else:
            noise = generator.uniform(0.01, 0.99, shape)
        return lambda leaf, part: 0.5 * leaf + (0.5 * noise[part]).astype(type_name)
    if values.min() >= 0:
        noise = np.exp(generator.normal(size=shape))
        return lambda leaf, part: (leaf + 0.1) * noise[part].astype(type_name)
    noise = generator.standard_normal(shape, "float32") * max(1.0, float(values.std()))
    return lambda leaf, part: leaf + noise[part].astype(type_name)


def cut_rows(count: int, shares: Sequence[float]) -> list[slice]:
    """Return uneven parts of at least one row each, which end at these fractions of the rows."""
    ends = {max(1, round(share * count)) for share in shares}
    bounds = sorted({0, *(end for end in ends if end < count), count})
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def take_part(rows: Any, part: slice) -> Any:
    return keras.tree.map_structure(lambda array: tf.convert_to_tensor(array[part]), rows)


def count_rows(rows: Any) -> int:
    return len(keras.tree.flatten(rows)[0])
