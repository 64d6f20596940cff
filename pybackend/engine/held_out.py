"""Evaluates a model on rows that are dealt to the workers, with the figures of one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.collective import Collective
from pybackend.data.arrays import nest
from pybackend.data.rows import Rows, make_zero_row
from pybackend.engine.calls import StepCalls
from pybackend.engine.feed import Feed
from pybackend.engine.global_batch import (
    NOTHING,
    GatheredRows,
    GlobalBatch,
    OverBatch,
    check_runs_eagerly,
)
from pybackend.engine.metrics import combine_logs
from pybackend.engine.overrides import disable_jit, override
from pybackend.engine.step_means import StepMeans, find_step_means
from pybackend.engine.steps import Position, StepOrSkip, count_rows


class HeldOut:
    """Rows to evaluate a model on, dealt to the workers.

    Parameters
    ----------
    rows
        This worker's rows.
    counts
        Rows of every worker, by rank.
    over
        What is computed from the rows of global batches of ``batch_size`` rows of each worker.
    """

    def __init__(
        self, rows: Rows, counts: Sequence[int], batch_size: int, over: OverBatch = NOTHING
    ) -> None:
        self._counts = np.array(counts)
        self._rows = rows
        self._batch_size = batch_size
        self._over = over
        self._steps: _StepsTogether | None = None
        # Nothing is exchanged before the end: each worker takes the steps of its own rows.
        self._data = batch_rows(rows, batch_size) if len(rows) else None

    def evaluate(
        self, model: Any, collective: Collective, callbacks: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Loss and metrics over all workers' rows; the same on every rank.

        Callbacks that see the end of it see these figures.
        """
        model.reset_metrics()
        if self._steps is None and (self._over != NOTHING or find_step_means(model)):
            feed = Feed(self._rows, list(self._counts), collective.rank, self._batch_size)
            if self._over != NOTHING:
                check_runs_eagerly(model, feed.may_be_empty)
            self._steps = _StepsTogether(model, collective, feed, self._over)
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
    """First of the callbacks: one rank's figures become those of all."""

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


class _StepsTogether:
    """Evaluates global batches step by step, together with the other workers."""

    def __init__(self, model: Any, collective: Collective, feed: Feed, over: OverBatch) -> None:
        self._model = model
        self._feed = feed
        self._calls = StepCalls(model)
        self._gathered = GatheredRows(collective, self._calls)
        self._batch = GlobalBatch(model, self._gathered, self._calls, over)
        self._position = Position(feed)
        self._means = StepMeans(model, self._calls, self._count_rows)
        self._function: Any = None

    @property
    def shared_variables(self) -> Sequence[Any]:
        """Variables of metrics that are the same on all workers."""
        return self._batch.variables

    def evaluate(self, hooks: Any) -> None:
        """Evaluate the model; the figures are seen by the callbacks."""
        test_step = self._model.test_step

        def step(data: Any) -> Any:
            self._calls.begin(count_rows(data))
            share = self._means.compute_share()
            with self._batch.active(), self._means.weigh(share):
                return test_step(data)

        def skip() -> None:
            with self._batch.active():
                self._calls.replace(self._means.compute_share)

        self._position.begin_epoch()
        together = StepOrSkip(self._model, step, skip) if self._feed.may_be_empty else step
        with ExitStack() as stack:
            stack.enter_context(self._batch.install())
            stack.enter_context(self._means.install())
            stack.enter_context(disable_jit(self._model))
            stack.enter_context(override(self._model, "test_step", together))
            # What callbacks evaluate is their own; a function is traced once.
            stack.enter_context(override(self._model, "test_function", self._function))
            try:
                self._model.evaluate(self._feed.dataset(), verbose=0, callbacks=hooks)
            except tf.errors.OpError as error:
                raise self._gathered.error or error from None
            self._function = self._model.test_function

    def _count_rows(self, rows: int) -> float:
        """Rows of the global batch of the step that begins; called once for each."""
        total = self._position.total_rows
        self._position.advance()
        return float(total or 0)


def build_metrics(model: Any, rows: Rows) -> None:
    """Have Keras create the metrics' variables, as a first step with rows would."""
    x, y, weight = (*nest(make_zero_row(rows)), None)[:3]
    model.test_on_batch(x, y, sample_weight=weight)
    model.reset_metrics()


def batch_rows(rows: Rows, batch_size: int) -> Any:
    """Batches of one worker's rows, in their order."""
    return Feed(rows, [len(rows)], 0, batch_size).dataset()
