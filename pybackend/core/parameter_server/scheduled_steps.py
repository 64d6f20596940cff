"""Steps that the chief schedules and any worker takes; parameter servers hold the variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from pybackend.core.data.rows import Rows, Spec
from pybackend.core.engine.statistics.global_batch import find_compiled_metrics
from pybackend.core.engine.statistics.metrics import to_plain
from pybackend.core.engine.step_changes import count_rows, override
from pybackend.core.job.job import TrainingJob
from pybackend.core.parameter_server import blocks
from pybackend.core.tf_config import ranks_of


class ScheduledSteps:
    """The workers' steps; each worker uses batches of its own rows.

    ``model`` has its variables on the parameter servers, because it was built in the strategy's
    scope, and ``own`` in this process. ``rows`` are some rows, in the shape that the model needs;
    ``written`` is the spec of the rows in the workers' files.
    """

    def __init__(
        self, strategy: Any, model: Any, own: Any, rows: Rows, written: Spec, job: TrainingJob
    ) -> None:
        self._model = model
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self._metrics = SummedMetrics(own, _make_variable)
            self._by_worker = _make_variable(tf.zeros(len(ranks_of(job.roles, "worker")), tf.int64))

        def make_batches() -> Any:
            seed = job.seed if job.shuffle else None
            found = blocks.iterate_blocks(blocks.TRAIN, written, rows.spec, seed)
            if seed is not None:
                found = blocks.draw(found, rows.row_bytes, seed)
            # Only its folder tells a server which worker it is: all servers run the same graph.
            number = tf.strings.to_number(tf.io.read_file(blocks.NUMBER), tf.int64)
            batches = blocks.batch(found.repeat(), job)
            return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(number).repeat(), batches))

        # Traced once, here; it runs on every worker.
        self._batches = iter(self._coordinator.create_per_worker_dataset(tf.function(make_batches)))

        def step(batches: Any) -> None:
            strategy.run(self._take, args=next(batches))

        self._step = tf.function(step)

    def exact_iterations(self) -> AbstractContextManager[None]:
        """Count every step of the optimizer within this context, since learning rates depend on it.

        Keras's own variable reads its value and writes the next one, and another worker may do the
        same in between.
        """
        count = self._model.optimizer.iterations
        return override(count, "assign_add", lambda value: count.value.assign_add(value))

    def run(self, number: int) -> dict[str, Any]:
        """Take a number of steps, on any worker that is ready; return the metrics."""
        for _ in range(number):
            self._coordinator.schedule(self._step, args=(self._batches,))
        self._coordinator.join()
        return self._metrics.read()

    @property
    def by_worker(self) -> list[int]:
        return [int(number) for number in self._by_worker.numpy()]

    def _take(self, number: Any, data: Any) -> None:
        model = self._model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        self._metrics.add(loss, count_rows(data), data, y_pred)
        self._by_worker.assign_add(tf.one_hot(number, self._by_worker.shape[0], dtype=tf.int64))


def _make_variable(value: Any) -> Any:
    return tf.Variable(value, trainable=False)


class SummedMetrics:
    """Sums of the loss and metrics over rows, in variables of the strategy, which ``make`` creates.

    A Keras metric reads its variables, then writes the new values: if several workers took steps at
    the same time, one of the steps would be lost. Here, a step computes the increments from its
    rows, and adds them in one operation. Only `read` changes the metrics of ``model``.
    """

    def __init__(self, model: Any, make: Callable[[Any], Any]) -> None:
        self._model = model
        # Each with its variables' values without rows, and the sums.
        self._parts: list[tuple[Any, list[Any], list[Any]]] = []
        for container in find_compiled_metrics(model):
            container.reset_state()
            begin = [variable.numpy() for variable in container.variables]
            self._parts.append((container, begin, list(map(make, begin))))
        self._loss = make(tf.zeros((), tf.float64))
        self._rows = make(tf.zeros((), tf.float64))

    def add(self, loss: Any, count: Any, data: Sequence[Any], y_pred: Any) -> None:
        """Add a batch with this mean loss and number of rows."""
        rows = tf.cast(count, tf.float64)
        self._loss.assign_add(tf.cast(loss, tf.float64) * rows)
        self._rows.assign_add(rows)
        for container, begin, sums in self._parts:
            empty = list(map(tf.constant, begin))
            added = container.stateless_update_state(empty, data[1], y_pred, *data[2:])
            for total, value in zip(sums, added, strict=True):
                total.assign_add(tf.cast(value, total.dtype))

    def read(self) -> dict[str, Any]:
        """Return the metrics since the last call, by name, and reset them."""
        metrics = {"loss": float(self._loss.numpy() / max(1.0, self._rows.numpy()))}
        for container, begin, sums in self._parts:
            for variable, total, value in zip(container.variables, sums, begin, strict=True):
                variable.assign(total.numpy())
                total.assign(value)
            metrics |= {name: to_plain(value) for name, value in container.result().items()}
            container.reset_state()
        self._loss.assign(0.0)
        self._rows.assign(0.0)
        return metrics
