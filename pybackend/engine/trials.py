"""Checks, on some rows, that metrics and the loss of an evaluation can be combined over workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np

from pybackend.collective import Collective, all_sum
from pybackend.data.arrays import nest
from pybackend.data.rows import Rows
from pybackend.engine.global_batch import OverBatch, find_compiled_metrics
from pybackend.engine.loss_trial import (
    choose_move,
    count_rows,
    cut_rows,
    is_mean_in_evaluation,
    mixes_rows,
    take_part,
)
from pybackend.errors import InputError
from pybackend.job.job import ModelJob
from pybackend.job.messages import Emit, Note
from pybackend.job.options import Exchange
from pybackend.model.behavior import keep_state
from pybackend.model.layers import is_of_keras
from pybackend.model.masks import check_masks, has_masked_loss

_ABOUT_TEST_STEP = (
    "the model has its own test_step: its results are averaged over the workers by rows, which is "
    "correct only for means over rows"
)
_ABOUT_MIXING = (
    "a layer combines the rows of a batch also outside of training: predictions and the metrics of "
    "an evaluation depend on each worker's own batches"
)
_MOST_TRIED = 32
# Rows to check for a small model and small rows, even if a step has fewer.
_LEAST_TRIED = 8
_LARGE_ROW_BYTES = 1 << 20
_LARGE_MODEL = 10_000_000

MetricsKind = Literal["sums", "not sums", "unknown"]
"""Result of the check whether the state of the metrics of `compile` may be summed over workers."""

# Positions at which the rows are cut into parts, as shares of them.
_SHARES = (0.1, 0.35)


def choose_rows(model: Any, rows: Rows, job: ModelJob) -> Any:
    """Return some finite rows, at most about a step's; None without such rows."""
    count = len(rows)
    if not count:
        return None
    parameters = sum(int(np.prod(weight.shape)) for weight in model.weights)
    is_small = rows.row_bytes < _LARGE_ROW_BYTES and parameters < _LARGE_MODEL
    least = _LEAST_TRIED if is_small else 2
    most = max(least, min(job.batch_size, _MOST_TRIED))
    generator = np.random.default_rng(job.seed)
    chosen = np.sort(generator.choice(count, min(count, most), replace=False))
    found = rows.take(chosen)
    finite = np.flatnonzero(_are_finite(found))  # only the training uses the others
    if not len(finite):
        return None
    # A single row is repeated, to have two parts.
    finite = np.resize(finite, max(2, len(finite)))
    return nest({key: column[finite] for key, column in found.items()})


def try_metrics(model: Any, rows: Any, job: ModelJob, collective: Collective) -> MetricsKind:
    """Check the metrics on every worker's rows; all workers get the same result."""
    if job.workers == 1 or not isinstance(job.exchange, Exchange):
        return "unknown"
    try:
        outcome = [0, 0] if rows is None else [0, bool(find_unsummable_metrics(model, rows))]
    except Exception:  # metrics that reject such rows; the training will report real errors
        outcome = [1, 0]
    failed, unsummable = all_sum(collective, outcome)
    if failed:
        return "unknown"
    return "not sums" if unsummable else "sums"


def find_over(
    model: Any,
    rows: Any,
    metrics: MetricsKind,
    job: ModelJob,
    collective: Collective,
    emit: Emit,
) -> OverBatch:
    """Return what an evaluation must compute from the rows of all workers, instead of sums."""
    if job.workers == 1:
        return OverBatch()
    if not is_of_keras(type(model).test_step):
        emit(Note(_ABOUT_TEST_STEP))
    if has_masked_loss(model):
        needs = not _is_weighted_by_masks(model)
    else:
        needs = rows is not None and not is_mean_in_evaluation(model, rows)
    mixes = rows is not None and mixes_rows(model, rows)
    needs, mixes = (bool(count) for count in all_sum(collective, [needs, mixes]))
    if mixes:
        emit(Note(_ABOUT_MIXING))
    return OverBatch(loss=needs, metrics=metrics == "not sums")


def _is_weighted_by_masks(model: Any) -> bool:
    """Return whether the loss can be averaged by the unmasked steps of each worker's rows."""
    try:
        check_masks(model)
    except InputError:
        return False
    return True


def _are_finite(columns: Mapping[str, Any]) -> Any:
    """Return a mask of the rows that only have finite numbers."""
    parts = [
        np.isfinite(column.reshape(len(column), -1)).all(axis=1)
        for column in columns.values()
        if column.dtype.kind == "f"
    ]
    return np.logical_and.reduce([np.ones(len(next(iter(columns.values()))), bool), *parts])


def find_unsummable_metrics(model: Any, rows: Any) -> list[str]:
    """Return names of metrics whose value over all rows differs from that of summed parts.

    Counts and sums can be summed over workers. Maxima and correlations cannot, nor values that are
    computed from a whole batch and then averaged over batches. The metrics passed to ``compile``
    are checked, with predictions that are changed at random. Afterwards the model's state is
    restored, but its metrics are built, and reset.

    Parameters
    ----------
    rows
        ``(x, y)`` or ``(x, y, sample_weight)`` of at least two rows.
    """
    containers = find_compiled_metrics(model)
    if not containers:
        return []
    count = count_rows(rows)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(rows)
    generator = np.random.default_rng(0)
    with keep_state(model):
        y_pred = keras.tree.map_structure(
            lambda leaf: choose_move(leaf, count, generator)(leaf, slice(0, count)),
            model(take_part(x, slice(0, count)), training=False),
        )
        return [
            name
            for container in containers
            for name in _find_unsummable(
                container, [y, y_pred, *([] if weight is None else [weight])], count
            )
        ]


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
