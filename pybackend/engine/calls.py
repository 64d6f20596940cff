"""The collective calls of one training step, in one order on all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


class StepCalls:
    """Chains the calls of the step being traced, and knows what a step without rows does instead.

    TensorFlow keeps no order between calls to the host, and every worker must make its calls in the
    same one.
    """

    def __init__(self) -> None:
        self.rows: Any = None
        """Of the local batch: a scalar tensor."""
        self._last: list[Any] = []
        self._replacements: list[Callable[[], object]] = []

    def begin(self, rows: Any) -> None:
        """Forget the calls of the step before, and of the branch of a graph before."""
        self.rows, self._last, self._replacements = rows, [], []

    @contextmanager
    def next(self) -> Iterator[None]:
        """What is made in this context comes after the call before."""
        with tf.control_dependencies(self._last):
            yield

    def end(self, results: Sequence[Any]) -> None:
        """Note the results of the call that was just made."""
        self._last = [] if tf.executing_eagerly() else list(results[:1])

    def record(self, replacement: Callable[[], object]) -> None:
        """Note what a worker without rows does in place of the call that was just made."""
        self._replacements.append(replacement)

    def replace(self, default: Callable[[], object]) -> None:
        """Take part in the calls of a step without rows.

        Parameters
        ----------
        default
            Used if this worker has made no step with rows yet.
        """
        kept = list(self._replacements)
        self.begin(tf.constant(0))
        for replacement in kept or [default]:
            replacement()
        self._replacements = kept
