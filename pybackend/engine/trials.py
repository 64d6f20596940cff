"""What is tried on some rows: may metrics, and the loss of an evaluation, be put together?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from pybackend.collective import Collective, all_sum
from pybackend.data.arrays import nest
from pybackend.data.rows import Rows
from pybackend.engine.global_batch import OverBatch
from pybackend.engine.loss_trial import is_mean_in_evaluation, mixes_rows
from pybackend.engine.metric_trial import find_unsummable_metrics
from pybackend.errors import InputError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note
from pybackend.job.options import Exchange
from pybackend.model.layers import is_of_keras
from pybackend.model.masks import check_masks, has_masked_loss

_ABOUT_TEST_STEP = (
    "the model has its own test_step: what it returns is averaged over the workers by rows, which "
    "is right for means over rows alone"
)
_ABOUT_MIXING = (
    "without training, too, a layer makes something of the rows of a batch together: predictions, "
    "and the figures of an evaluation, are those of each worker's own batches"
)
_MOST_TRIED = 32
# Of a small model and small rows so many are tried, even if a step has fewer.
_LEAST_TRIED = 8
_LARGE_ROW_BYTES = 1 << 20
_LARGE_MODEL = 10_000_000

MetricsKind = Literal["sums", "not sums", "unknown"]
"""Whether the state of the metrics given to `compile` may be summed over the workers."""


def choose_rows(model: Any, rows: Rows, job: Job) -> Any:
    """Some finite rows, about as many as a step has memory for; None if there are none."""
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
    finite = np.flatnonzero(_are_finite(found))  # others are left to the model
    if not len(finite):
        return None
    # Of a single row two parts are made, too.
    finite = np.resize(finite, max(2, len(finite)))
    return nest({key: column[finite] for key, column in found.items()})


def try_metrics(model: Any, rows: Any, job: Job, collective: Collective) -> MetricsKind:
    """Try the metrics on every worker's rows; all workers get the same answer."""
    if job.workers == 1 or not isinstance(job.exchange, Exchange):
        return "unknown"
    try:
        outcome = [0, 0] if rows is None else [0, bool(find_unsummable_metrics(model, rows))]
    except Exception:  # they take no rows of this kind, or the training will show why
        outcome = [1, 0]
    failed, unsummable = all_sum(collective, outcome)
    if failed:
        return "unknown"
    return "not sums" if unsummable else "sums"


def find_over(
    model: Any,
    rows: Any,
    metrics: MetricsKind,
    job: Job,
    collective: Collective,
    emit: Emit,
) -> OverBatch:
    """What an evaluation computes from the rows of all workers, since it may not be summed."""
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
    """Whether what masks leave of each worker's rows is enough to average its loss."""
    try:
        check_masks(model)
    except InputError:
        return False
    return True


def _are_finite(columns: Mapping[str, Any]) -> Any:
    """Which rows have finite numbers only."""
    parts = [
        np.isfinite(column.reshape(len(column), -1)).all(axis=1)
        for column in columns.values()
        if column.dtype.kind == "f"
    ]
    return np.logical_and.reduce([np.ones(len(next(iter(columns.values()))), bool), *parts])
