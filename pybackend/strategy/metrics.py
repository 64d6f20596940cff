"""Loss and metrics of steps that several workers take at the same time, each on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pybackend.engine.global_batch import find_compiled_metrics
from pybackend.engine.metrics import to_plain


class SummedMetrics:
    """Sums over rows, in variables of the strategy, of what each step adds.

    A metric of Keras reads its variables, and writes the new values: of two steps at the same time
    one would be lost. Here a step computes what its rows add, and adds it in one operation.

    Parameters
    ----------
    model
        Whose compiled metrics may be summed, and are built; it is not changed but by `read`.
    make
        Called with an initial value: a variable of the strategy's.
    """

    def __init__(self, model: Any, make: Callable[[Any], Any]) -> None:
        self._model = model
        self._containers = find_compiled_metrics(model)
        for container in self._containers:
            container.reset_state()
        self._begin = [[v.numpy() for v in c.variables] for c in self._containers]
        self._sums = [[make(value) for value in values] for values in self._begin]
        self._loss = make(tf.zeros((), tf.float64))
        self._rows = make(tf.zeros((), tf.float64))

    def add(self, loss: Any, count: Any, data: Sequence[Any], y_pred: Any) -> None:
        """Add a batch: its mean loss, its rows, and ``(x, y)`` or ``(x, y, sample_weight)``."""
        rows = tf.cast(count, tf.float64)
        self._loss.assign_add(tf.cast(loss, tf.float64) * rows)
        self._rows.assign_add(rows)
        for container, begin, sums in zip(self._containers, self._begin, self._sums, strict=True):
            added = container.stateless_update_state(
                list(map(tf.constant, begin)), data[1], y_pred, *data[2:]
            )
            for total, value in zip(sums, added, strict=True):
                total.assign_add(tf.cast(value, total.dtype))

    def read(self) -> dict[str, Any]:
        """The figures since the last call, by name; the next ones begin anew."""
        figures = {"loss": float(self._loss.numpy() / max(1.0, self._rows.numpy()))}
        for container, begin, sums in zip(self._containers, self._begin, self._sums, strict=True):
            for variable, total, value in zip(container.variables, sums, begin, strict=True):
                variable.assign(total.numpy())
                total.assign(value)
            figures |= {name: to_plain(value) for name, value in container.result().items()}
            container.reset_state()
        self._loss.assign(0.0)
        self._rows.assign(0.0)
        return figures
