"""Evaluation with synchronized steps, for metrics that depend on the rows of a batch.

Losses that compare rows, metrics computed from a whole batch, and losses of several outputs, which
Keras averages over batches, are computed from global batches, as in one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_sum
from pybackend.core.engine.calls import StepCalls
from pybackend.core.engine.feed import Feed
from pybackend.core.engine.overrides import disable_jit, override
from pybackend.core.engine.pipeline_feed import count_rows
from pybackend.core.engine.statistics.global_batch import (
    NOTHING,
    GatheredRows,
    GlobalBatch,
    OverBatch,
)
from pybackend.core.engine.statistics.metrics import StepMeans, ValidStepCounter, find_step_means
from pybackend.core.engine.steps import Position, StepOrSkip
from pybackend.core.model.view import ModelView


def needs_others(view: ModelView, over: OverBatch) -> bool:
    """Return whether a worker's metrics in a step depend on the rows of other workers."""
    return over != NOTHING or bool(find_step_means(view.model)) or view.has_masked_loss


class StepsTogether:
    """Evaluation of global batches, with steps that are synchronized with the other workers."""

    def __init__(
        self, view: ModelView, collective: Collective, feed: Feed, over: OverBatch
    ) -> None:
        self._model = model = view.model
        self._feed = feed
        self._calls = StepCalls()
        self._position = Position(feed)
        self._gathered = GatheredRows(collective, self._calls, self._position.find_order)
        self._batch = GlobalBatch(model, self._gathered, self._calls, over)
        # With masks, a worker's loss is not a mean over its rows.
        is_masked = view.has_masked_loss and not over.loss
        self._valid = ValidStepCounter(model) if is_masked else None
        self._collective = collective
        self._error: BaseException | None = None
        self._means = StepMeans(model, self._calls, self._count_rows)
        self._function: Any = None

    @property
    def shared_variables(self) -> Sequence[Any]:
        """Variables of metrics that are the same on all workers."""
        return self._batch.variables

    def evaluate(self, hooks: Any) -> None:
        """Evaluate the model; the callbacks get the metrics."""
        test_step = self._model.test_step

        def step(data: Any) -> Any:
            self._calls.begin(count_rows(data))
            share = self._means.compute_share()
            with self._batch.active(), self._means.weigh(share):
                return test_step(data)

        def skip() -> None:
            with self._batch.active():
                self._calls.replace(self._take_part)

        self._position.begin_epoch()
        self._gathered.step = 0
        together = StepOrSkip(self._model, step, skip) if self._feed.may_be_empty else step
        with ExitStack() as stack:
            stack.enter_context(self._batch.install())
            stack.enter_context(self._means.install())
            if self._valid is not None:
                average = self._average(self._model.compute_loss, self._valid)
                stack.enter_context(override(self._model, "compute_loss", average))
            stack.enter_context(disable_jit(self._model))
            stack.enter_context(override(self._model, "test_step", together))
            # Evaluations by callbacks use their own function; this one is traced once.
            stack.enter_context(override(self._model, "test_function", self._function))
            try:
                self._model.evaluate(self._feed.dataset(), verbose=0, callbacks=hooks)
            except tf.errors.OpError as error:
                raise self._error or self._gathered.error or error from None
            self._function = self._model.test_function

    def _take_part(self) -> None:
        """Take part in a step without rows, on a worker that runs eagerly and never had rows."""
        self._means.compute_share()
        if self._valid is not None:
            self._compute_mean(tf.zeros([]), 0.0)

    def _average(self, compute_loss: Callable[..., Any], valid: ValidStepCounter) -> Any:
        """Make a model's ``compute_loss`` a mean over workers, weighted by unmasked steps."""
        watched = valid.watch(compute_loss)

        def averaged(*args: Any, **options: Any) -> Any:
            own = watched(*args, **options)
            weight = valid.weight(self._calls.rows)
            mean = self._compute_mean(own, weight)
            self._calls.record(lambda: self._compute_mean(tf.zeros_like(own), 0.0))
            return mean

        averaged.__signature__ = inspect.signature(compute_loss)  # type: ignore[attr-defined]
        return averaged

    def _compute_mean(self, loss: Any, weight: Any) -> Any:
        def compute(loss: Any, weight: Any) -> Any:
            try:
                total, weights = all_sum(self._collective, [weight * loss, weight])
            except BaseException as error:
                self._error = self._error or error
                raise
            return np.asarray(total / weights if weights else 0.0, loss.dtype)

        weight = tf.convert_to_tensor(weight, tf.float32)
        with self._calls.next():
            mean = tf.numpy_function(compute, [loss, weight], loss.dtype)
        self._calls.end([mean])
        mean.set_shape([])
        return mean

    def _count_rows(self, rows: int) -> float:
        """Return the number of rows in the current step's global batch; called once per step."""
        total = self._position.total_rows
        self._position.advance()
        return float(total or 0)
