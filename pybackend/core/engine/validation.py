"""Validation during training: each worker evaluates its part of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective
from pybackend.core.data.arrays import nest
from pybackend.core.data.rows import Rows, make_zero_row
from pybackend.core.engine.feed import Feed
from pybackend.core.engine.statistics.global_batch import NOTHING, OverBatch, check_runs_eagerly
from pybackend.core.engine.statistics.metrics import combine_logs
from pybackend.core.engine.steps_together import StepsTogether, needs_others
from pybackend.core.model.view import ModelView


class Validation:
    """Validation rows, sharded across the workers.

    Parameters
    ----------
    rows
        This worker's rows.
    counts
        Rows of every worker, by rank.
    over
        The values that are computed from the rows of global batches, with ``batch_size`` rows per
        worker.
    """

    def __init__(
        self, rows: Rows, counts: Sequence[int], batch_size: int, over: OverBatch = NOTHING
    ) -> None:
        self._counts = np.array(counts)
        self._rows = rows
        self._batch_size = batch_size
        self._over = over
        self._steps: StepsTogether | None = None
        # Workers exchange values only at the end: each takes the steps of its own rows.
        self._data = batch_rows(rows, batch_size) if len(rows) else None

    def prepare(self, view: ModelView, collective: Collective) -> None:
        """Decide whether the workers must synchronize each step of an evaluation.

        Raises
        ------
        InputError
            They must, but cannot.
        """
        if collective.world_size == 1 or not needs_others(view, self._over):
            return
        feed = Feed(self._rows, list(self._counts), collective.rank, self._batch_size)
        if self._over != NOTHING:
            check_runs_eagerly(view.model, feed.begins_empty)
        self._steps = StepsTogether(view, collective, feed, self._over)

    def evaluate(
        self, model: Any, collective: Collective, callbacks: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Return loss and metrics over all workers' rows, equal on all ranks; call `prepare` first.

        Callbacks get these values at the end of the evaluation.
        """
        model.reset_metrics()
        shared = self._steps.shared_variables if self._steps else []
        combine = _Combine(model, collective, self._counts, shared)
        hooks = keras.callbacks.CallbackList([combine, *callbacks])
        if self._steps is not None:
            self._steps.evaluate(hooks)
        elif self._data is None:
            hooks.on_test_begin()
            build_metrics(model, self._rows)
            hooks.on_test_end({})
        else:
            model.evaluate(self._data, verbose=0, callbacks=hooks)
        return combine.figures


class _Combine(keras.callbacks.Callback):
    """First of the callbacks: replaces one rank's metrics with those over all ranks."""

    def __init__(
        self, model: Any, collective: Collective, counts: Any, shared: Sequence[Any]
    ) -> None:
        super().__init__()
        self._shared = shared
        self.figures: dict[str, Any] = {}
        self._evaluated = model
        self._collective = collective
        self._counts = counts

    def on_test_end(self, logs: Any = None) -> None:
        logs = {} if logs is None else logs
        self.figures = combine_logs(
            self._evaluated, logs, self._collective, self._counts, self._shared
        )
        logs.clear()
        logs.update(self.figures)


def build_metrics(model: Any, rows: Rows) -> None:
    """Make Keras create the metrics' variables, as a first step with rows would."""
    model.evaluate(tf.data.Dataset.from_tensors(nest(make_zero_row(rows))), verbose=0)
    model.reset_metrics()


def batch_rows(rows: Rows, batch_size: int) -> Any:
    """Return batches of one worker's rows, in row order."""
    return Feed(rows, [len(rows)], 0, batch_size).dataset()
