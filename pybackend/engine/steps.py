"""A training step on a local batch that may have no rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from pybackend.engine.feed import Feed
from pybackend.engine.stream import StreamFeed

_ABSENT = object()


class Position:
    """Where in an epoch the training is; the same on every worker.

    Counts on the host, so that what a step needs to know of the other workers' rows is at hand
    without asking them.
    """

    def __init__(self, feed: Feed | StreamFeed) -> None:
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
        """Rows of the global batch at this step; None where no worker knows."""
        if self._feed.total_rows is None:
            return None
        # A train_step that exchanges twice is beyond the end before the epoch is.
        return int(self._feed.total_rows[min(self.step, self._feed.steps - 1)])

    @property
    def is_last(self) -> bool:
        """Whether the epoch ends with this step."""
        return self.step == self._feed.steps - 1


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give one object an attribute of its own for a while."""
    kept = vars(holder).get(name, _ABSENT)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if kept is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, kept)


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Switch a model's ``jit_compile`` off for a while."""
    compiled = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = compiled


def is_plain(model: Any) -> bool:
    """Whether a model trains by Keras's own ``train_step``."""
    return str(type(model).train_step.__module__).startswith("keras.")


def rows_in(data: Any) -> Any:
    """Number of rows of a batch, as a scalar int32 tensor."""
    return tf.shape(tf.nest.flatten(data)[0])[0]


class StepOrSkip:
    """Runs a ``train_step`` where the local batch has rows, and ``skip`` where it has none.

    Either way the step has logs of one structure: without rows, the metrics as they stand, and
    zeros for what a train_step of the user's own logs besides.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], skip: Callable[[], None]) -> None:
        self._model = model
        self._step = step
        self._skip = skip
        self._logged: dict[str, Any] = {}

    def __call__(self, data: Any) -> Any:
        """Logs of the step."""
        rows = rows_in(data)
        if tf.executing_eagerly():
            return self._stepped(data) if rows > 0 else self._skipped()
        # The branch with rows is traced first: it tells the other one what is logged.
        return tf.cond(rows > 0, lambda: self._stepped(data), self._skipped)

    def _stepped(self, data: Any) -> Any:
        logs = tf.nest.map_structure(tf.convert_to_tensor, dict(self._step(data)))
        self._logged = tf.nest.map_structure(lambda value: (value.shape, value.dtype), logs)
        return logs

    def _skipped(self) -> Any:
        self._skip()
        metrics = self._model.get_metrics_result()
        if tf.executing_eagerly():
            return metrics
        return {
            name: tf.cast(metrics[name], logged[1]) if name in metrics else tf.zeros(*logged)
            for name, logged in self._logged.items()
        }
