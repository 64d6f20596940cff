"""The collective calls in one training step, in the same order on all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from pybackend.core.errors import InputError
from pybackend.core.words import setting


class StepCalls:
    """Chain of the calls in the step being traced, with replacements for a step without rows.

    TensorFlow does not order calls to the host, and every worker must make its calls in the same
    order. Each call increments a counter, which the next call waits for, even across steps.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._turn = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._exchanges = 0
        self.rows: Any = None
        """Rows of the local batch: a scalar tensor."""
        self._last: list[Any] = []
        self._replacements: list[Callable[[], object]] = []

    def begin(self, rows: Any) -> None:
        """Discard the calls of the previous step, and of the previous branch of a graph."""
        self.rows, self._last, self._replacements = rows, [], []
        self._exchanges = 0
        if not tf.executing_eagerly():
            self._last = [self._turn.read_value()]

    @contextmanager
    def next(self) -> Iterator[None]:
        """Order the operations created within this context after the previous call."""
        known = _list_graphs()
        if not all(tensor.graph in known for tensor in self._last):
            raise InputError(
                "the workers exchange values inside a loop or a tf.function of the model itself, "
                "so the order of their exchanges is unknown: remove the tf.function, and move "
                f"layers with {setting(synchronized=True)} out of loops"
            )
        with tf.control_dependencies(self._last):
            yield

    def end(self, results: Sequence[Any]) -> None:
        """Record the results of the call that was just made."""
        if not tf.executing_eagerly():
            with tf.control_dependencies(results[:1]):
                self._last = [self._turn.assign_add(1, read_value=False)]

    def count_exchange(self) -> int:
        """Return the number of the gradient exchange that is starting, from 0 in each step."""
        self._exchanges += 1
        return self._exchanges - 1

    def record(self, replacement: Callable[[], object]) -> None:
        """Record what a worker without rows does instead of the call that was just made."""
        self._replacements.append(replacement)

    def replace(self, default: Callable[[], object]) -> None:
        """Take part in the calls of a step without rows.

        Parameters
        ----------
        default
            Used if this worker has not yet taken a step with rows.
        """
        replacements = list(self._replacements)
        self.begin(tf.constant(0))
        for replacement in replacements or [default]:
            replacement()
        self._replacements = replacements


def _list_graphs() -> list[Any]:
    """Return the graph being traced and its enclosing graphs."""
    graphs = [tf.compat.v1.get_default_graph()]
    while (outer := getattr(graphs[-1], "outer_graph", None)) is not None:
        graphs.append(outer)
    return graphs
