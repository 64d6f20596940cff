"""Steps of an epoch: the current position, and steps whose local batch may have no rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from pybackend.core.engine.feed import Feed
from pybackend.core.engine.pipeline_feed import PipelineFeed, count_rows
from pybackend.core.model.view import ModelView


class Position:
    """Current step of the epoch; the same on every worker.

    It is counted on the host, so that a step knows the other workers' rows without communication.
    """

    def __init__(self, feed: Feed | PipelineFeed) -> None:
        self._feed = feed
        self.step = 0

    def begin_epoch(self) -> None:
        """Return to the first step that these workers take in the epoch."""
        self.step = self._feed.taken

    def advance(self) -> None:
        """Advance to the next step."""
        self.step += 1

    @property
    def total_rows(self) -> int | None:
        """Number of rows in the global batch of this step; None if no worker knows."""
        if self._feed.total_rows is None:
            return None
        # A train_step that exchanges twice passes the end before the epoch ends.
        return int(self._feed.total_rows[min(self.step, self._feed.steps - 1)])

    @property
    def is_uneven(self) -> bool:
        """True if the arrays of a batch have different numbers of rows."""
        return isinstance(self._feed, PipelineFeed) and self._feed.is_uneven

    @property
    def find_order(self) -> Callable[[int], Any] | None:
        """`Feed.order_at`, if the rows of a batch have an order."""
        feed = self._feed
        return feed.order_at if isinstance(feed, Feed) and feed.is_sharded else None

    @property
    def is_last(self) -> bool:
        """True if the epoch ends with this step."""
        return self.step == self._feed.steps - 1


def count_accumulated_steps(optimizer: Any) -> int:
    """Return the number of steps whose gradients may be exchanged as one sum.

    This is 1 if the optimizer inspects each step's gradients: a loss-scaling optimizer skips those
    that are not finite.
    """
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


class StepOrSkip:
    """Step that runs if the local batch has rows; ``skip`` runs if it does not.

    The logs have the same structure in both cases: without rows, they hold the current metrics, and
    zeros for other values that a custom train_step logs.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], skip: Callable[[], None]) -> None:
        self._model = model
        self._step = step
        self._skip = skip
        self._logged: dict[str, Any] = {}

    def __call__(self, data: Any) -> Any:
        """Run the step, or skip it; return the logs."""
        rows = count_rows(data)
        if tf.executing_eagerly():
            return self._take_step(data) if rows > 0 else self._skip_step()
        # The branch with rows is traced first: it determines the logs of the other one.
        return tf.cond(rows > 0, lambda: self._take_step(data), self._skip_step)

    def _take_step(self, data: Any) -> Any:
        logs = tf.nest.map_structure(tf.convert_to_tensor, dict(self._step(data)))
        self._logged = tf.nest.map_structure(lambda value: (value.shape, value.dtype), logs)
        return logs

    def _skip_step(self) -> Any:
        self._skip()
        metrics = self._model.get_metrics_result()
        if tf.executing_eagerly():
            return metrics
        return {
            name: tf.cast(metrics[name], logged[1]) if name in metrics else tf.zeros(*logged)
            for name, logged in self._logged.items()
        }


def normalize_spectra(model: Any) -> None:
    """Update weights as a forward pass on any rows would: only in `SpectralNormalization`."""
    for layer in ModelView(model).layers:  # the step being traced may have created some
        if isinstance(layer, keras.layers.SpectralNormalization):
            vector, kernel = keras.ops.cond(
                keras.ops.all(keras.ops.equal(layer.kernel, 0)),
                lambda layer=layer: (layer.vector_u.value, layer.kernel.value),
                layer.normalized_weights,
            )
            layer.vector_u.assign(vector)
            layer.kernel.assign(kernel)
