"""The steps of an epoch: which one it is, and one whose local batch may have no rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from pybackend.engine.feed import Feed
from pybackend.engine.pipeline_feed import PipelineFeed, count_rows
from pybackend.model.layers import find_layers, is_of_keras


class Position:
    """The step of the epoch that the training is at; the same on every worker.

    Counts on the host, so that what a step needs to know of the other workers' rows is at hand
    without asking them.
    """

    def __init__(self, feed: Feed | PipelineFeed) -> None:
        self._feed = feed
        self.step = 0

    def begin_epoch(self) -> None:
        """Back to the first step."""
        self.step = 0

    def advance(self) -> None:
        """To the next step."""
        self.step += 1

    @property
    def total_rows(self) -> int | None:
        """Rows of the global batch at this step; None if no worker knows."""
        if self._feed.total_rows is None:
            return None
        # A train_step that exchanges twice is beyond the end before the epoch is.
        return int(self._feed.total_rows[min(self.step, self._feed.steps - 1)])

    @property
    def is_uneven(self) -> bool:
        """Whether the arrays of a batch have different numbers of rows."""
        return isinstance(self._feed, PipelineFeed) and self._feed.is_uneven

    @property
    def find_order(self) -> Callable[[int], Any] | None:
        """`Feed.order_at`, if the rows of a batch have an order."""
        feed = self._feed
        return feed.order_at if isinstance(feed, Feed) and feed.is_dealt else None

    @property
    def is_last(self) -> bool:
        """Whether the epoch ends with this step."""
        return self.step == self._feed.steps - 1


def has_keras_train_step(model: Any) -> bool:
    """Whether a model trains by Keras's own ``train_step``."""
    return is_of_keras(type(model).train_step)


class StepOrSkip:
    """Runs a step if the local batch has rows, and ``skip`` if it has none.

    Either way the step has logs of one structure: without rows, the metrics as they are, and
    zeros for what else a custom train_step logs.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], skip: Callable[[], None]) -> None:
        self._model = model
        self._step = step
        self._skip = skip
        self._logged: dict[str, Any] = {}

    def __call__(self, data: Any) -> Any:
        """Logs of the step."""
        rows = count_rows(data)
        if tf.executing_eagerly():
            return self._take_step(data) if rows > 0 else self._skip_step()
        # The branch with rows is traced first: from it the other one knows what is logged.
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
    """What a forward pass does to weights, whatever the rows: `SpectralNormalization` alone."""
    for layer in find_layers(model):
        if isinstance(layer, keras.layers.SpectralNormalization):
            vector, kernel = keras.ops.cond(
                keras.ops.all(keras.ops.equal(layer.kernel, 0)),
                lambda layer=layer: (layer.vector_u.value, layer.kernel.value),
                layer.normalized_weights,
            )
            layer.vector_u.assign(vector)
            layer.kernel.assign(kernel)
