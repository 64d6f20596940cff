"""Evaluates a model on rows that are dealt to the workers, with the figures of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pybackend.collective import Collective
from pybackend.data.arrays import nest
from pybackend.data.rows import Rows, make_zero_row
from pybackend.engine.feed import Feed
from pybackend.engine.metrics import combine_logs


class HeldOut:
    """Rows to evaluate a model on, dealt to the workers.

    Parameters
    ----------
    rows
        This worker's rows.
    counts
        Rows of every worker, by rank.
    """

    def __init__(self, rows: Rows, counts: Sequence[int], batch_size: int) -> None:
        self._counts = np.array(counts)
        self._rows = rows
        # Nothing is exchanged before the end: each worker takes the steps of its own rows.
        self._data = batch_rows(rows, batch_size) if len(rows) else None

    def evaluate(self, model: Any, collective: Collective) -> dict[str, Any]:
        """Loss and metrics over all workers' rows; the same on every rank."""
        model.reset_metrics()
        logs = {}
        if self._data is None:
            build_metrics(model, self._rows)
        else:
            logs = model.evaluate(self._data, verbose=0, return_dict=True)
        return combine_logs(model, logs, collective, self._counts)


def build_metrics(model: Any, rows: Rows) -> None:
    """Have Keras create the metrics' variables, as a first step with rows would."""
    x, y, weight = (*nest(make_zero_row(rows)), None)[:3]
    model.test_on_batch(x, y, sample_weight=weight)
    model.reset_metrics()


def batch_rows(rows: Rows, batch_size: int) -> Any:
    """Batches of one worker's rows, in their order."""
    return Feed(rows, [len(rows)], 0, batch_size).dataset()
