"""The collective calls of one training step, in one order on all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.errors import InputError


class StepCalls:
    """Chains the calls of the step being traced, and knows what a step without rows does instead.

    TensorFlow keeps no order between calls to the host, and every worker must make its calls in the
    same one. The first waits for the end of the step before, which updates the model's weights.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rows: Any = None
        """Of the local batch: a scalar tensor."""
        self._last: list[Any] = []
        self._replacements: list[Callable[[], object]] = []

    def begin(self, rows: Any) -> None:
        """Forget the calls of the step before, and of the branch of a graph before."""
        self.rows, self._last, self._replacements = rows, [], []
        variables = self._model.trainable_variables
        if variables and not tf.executing_eagerly():
            smallest = min(variables, key=lambda variable: int(np.prod(variable.shape)))
            self._last = [tf.convert_to_tensor(smallest)]

    @contextmanager
    def next(self) -> Iterator[None]:
        """What is made in this context comes after the call before."""
        known = _list_graphs()
        if not all(tensor.graph in known for tensor in self._last):
            raise InputError(
                "the workers exchange something inside a loop or a tf.function of the model's own, "
                "so that the order of their exchanges is not known: leave the tf.function out, and "
                "take layers with synchronized=True out of loops"
            )
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


def _list_graphs() -> list[Any]:
    """The graph being traced, and those around it."""
    graphs = [tf.compat.v1.get_default_graph()]
    while (outer := getattr(graphs[-1], "outer_graph", None)) is not None:
        graphs.append(outer)
    return graphs
