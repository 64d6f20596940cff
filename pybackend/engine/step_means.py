"""Means of one value per step, such as the losses of several outputs, over all workers' rows.

Keras averages such values over the steps, without regard to their rows. A worker's value is
weighted by its share of the step's rows, so that the values of all workers together count as one
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.data.arrays import nest
from pybackend.data.rows import Rows, make_zero_row
from pybackend.engine.calls import StepCalls
from pybackend.engine.overrides import override
from pybackend.engine.steps import has_keras_train_step
from pybackend.model.behavior import compute_loss, keep_state


def find_step_means(model: Any) -> list[Any]:
    """Return the metrics of a model that may be means of one value per step.

    Keras itself weights the total loss by rows.
    """
    means = [m for m in model.metrics if type(m).update_state is keras.metrics.Mean.update_state]
    return [m for m in means if not (m.name == "loss" and has_keras_train_step(model))]


def build_losses(model: Any, rows: Rows) -> None:
    """Make Keras create the metrics of several losses, as a first step would."""
    # Two rows, since a loss may compare rows.
    data = nest({key: np.repeat(array, 2, 0) for key, array in make_zero_row(rows).items()})
    with keep_state(model), suppress(Exception):  # the training will report the error
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        compute_loss(model, data, model(x, training=False), False)
    model.reset_metrics()


class StepMeans:
    """Weights of one value per step, in the steps that are traced while `weigh` lasts.

    Parameters
    ----------
    count_total
        Returns the rows of the step's global batch, given this worker's; called once for each step,
        also by workers without rows.
    add_up
        Returns sums over the workers.
    """

    def __init__(
        self,
        model: Any,
        calls: StepCalls,
        count_total: Callable[[int], float],
        add_up: Callable[[list[float]], Sequence[float]] | None = None,
    ) -> None:
        self._model = model
        self._calls = calls
        self._count_total = count_total
        self._add_up = add_up or list
        self.share: Any = None
        """Share of the step that is being traced, while `weigh` lasts."""
        self.is_always_asked = False
        self.is_uneven = False
        """True if Keras weights the total loss by rows other than those of the labels."""

    @contextmanager
    def install(self) -> Iterator[None]:
        """Replace the metrics' ``update_state`` while the context lasts."""
        with ExitStack() as stack:
            for mean in find_step_means(self._model):
                watched = self._watch(mean.update_state)
                stack.enter_context(override(mean, "update_state", watched))
            for mean in self._model.metrics if self.is_uneven else ():
                if mean.name == "loss":
                    counted = self._count(mean.update_state)
                    stack.enter_context(override(mean, "update_state", counted))
            yield

    @contextmanager
    def weigh(self, share: Any) -> Iterator[None]:
        """Trace a step in this context, with this worker's share of the step's rows."""
        self.share = share
        try:
            yield
        finally:
            self.share = None

    def _watch(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def watched(values: Any, sample_weight: Any = None) -> Any:
            is_one = self.share is not None and keras.ops.ndim(values) == 0
            weight = self.share if is_one and sample_weight is None else sample_weight
            return update(values, sample_weight=weight)

        return watched

    def _count(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def counted(values: Any, sample_weight: Any = None) -> Any:
            return update(values, sample_weight=self.compute_weight(sample_weight))

        return counted

    def compute_weight(self, own: Any) -> Any:
        """Return this worker's share of the weight of the total loss: all rows of `x`."""

        def compute(rows: Any, own: Any) -> Any:
            total, weights = self._add_up([float(rows), float(own)])
            return np.float32(rows / total * weights if total else 0.0)

        with self._calls.next():
            weight = tf.numpy_function(compute, [self._calls.rows, own], tf.float32)
        weight.set_shape([])
        self._calls.end([weight])
        self._calls.record(lambda: self.compute_weight(0))
        return weight

    def compute_share(self) -> Any:
        """Return this worker's share of the rows of the step that begins; None if not needed."""
        if not self.is_always_asked and not find_step_means(self._model):
            return None

        def compute(rows: Any) -> Any:
            total = self._count_total(int(rows))
            return np.float32(rows / total if total else 0.0)

        with self._calls.next():
            share = tf.numpy_function(compute, [self._calls.rows], tf.float32)
        share.set_shape([])
        self._calls.end([share])
        self._calls.record(self.compute_share)
        return share
