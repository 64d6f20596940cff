"""Local steps on each worker, with weights averaged only every few steps, for slow networks.

Local SGD (Stich, "Local SGD converges fast and communicates little", 2019) averages the weights
after every H steps. DiLoCo (Douillard et al., "DiLoCo: distributed low-communication training of
language models", 2023) treats the change of that average as a gradient, which it applies with
Nesterov momentum. The result differs from that of one process, unless H is 1 and the optimizer is
plain SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.collective import Collective
from pybackend.core.engine.flat import FlatExchange, Layout, StopAgreement
from pybackend.core.engine.overrides import disable_jit, override
from pybackend.core.engine.pipeline_feed import count_rows
from pybackend.core.engine.steps import StepOrSkip, normalize_spectra

Array = npt.NDArray[Any]


class OuterOptimizer:
    """Optimizer for flat weights that are averaged over the workers.

    With v = momentum v + d for the mean change d of the weights since the last average, the weights
    become w - learning_rate (d + momentum v): Nesterov momentum. Learning rate 1 and momentum 0
    give the plain average.

    It stores two buffers, each as large as the weights: the last averaged weights, and v.
    """

    def __init__(self, exchange: FlatExchange, learning_rate: float, momentum: float) -> None:
        self._exchange = exchange
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._last: list[Array] = []
        self._velocity: list[Array] = []

    def begin(self, weights: list[Array]) -> None:
        """Start from weights that all workers share."""
        self._last = [np.array(weight) for weight in weights]
        self._velocity = [np.zeros_like(weight) for weight in weights]

    def read_state(self) -> dict[str, Any]:
        """Return a copy of the two buffers, and of anything that the exchange has not sent yet."""
        buffers = {"last": self._last, "velocity": self._velocity}
        copies = {name: [np.array(part) for part in parts] for name, parts in buffers.items()}
        return {**copies, "exchange": self._exchange.read_state()}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `read_state` returned."""
        self._last, self._velocity = state["last"], state["velocity"]
        self._exchange.restore_state(state["exchange"])

    def step(self, rows: float, weights: list[Array]) -> list[Array]:
        """Return new weights, the same on all workers.

        Parameters
        ----------
        rows
            Number of rows on which this worker has trained since the last average: the weight of
            this worker in the new one (McMahan et al., "Communication-efficient learning of deep
            networks from decentralized data", 2017).
        """
        change = [last - weight for last, weight in zip(self._last, weights, strict=True)]
        means, _ = self._exchange.exchange(rows, 0.0, change)
        for number, mean in enumerate(means):
            move = mean
            if self._momentum:
                self._velocity[number] = self._momentum * self._velocity[number] + mean
                move = mean + self._momentum * self._velocity[number]
            rate = mean.dtype.type(self._learning_rate)
            self._last[number] = (self._last[number] - rate * move).astype(mean.dtype, copy=False)
        # Copies, because TensorFlow retains the arrays.
        return [np.array(weight) for weight in self._last]


class WeightAveraging:
    """Averaging of one model's weights over the workers, for the duration of a ``fit``.

    Replaces a `GradientExchange`. Each worker has its own optimizer state.

    Parameters
    ----------
    every
        Number of steps between averages, H. Weights are also averaged at the end of each epoch.
    """

    def __init__(
        self,
        model: Any,
        collective: Collective,
        *,
        every: int,
        learning_rate: float,
        momentum: float,
        may_be_empty: bool,
        nominal_rows: int,
        compression: Literal["fp16", "bf16"] | None = None,
    ) -> None:
        self._model = model
        self._every = every
        self._may_be_empty = may_be_empty
        self.agreement = StopAgreement()
        self.error: BaseException | None = None
        variables = model.trainable_variables
        self._types = [tf.as_dtype(v.dtype) for v in variables]
        wide = np.float64 if tf.float64 in self._types else np.float32
        shapes = [tuple(v.shape) for v in variables]
        layout = Layout.of(shapes, np.dtype(wide).itemsize, float("inf"))
        exchange = FlatExchange(
            collective,
            layout,
            wide,
            self.agreement,
            nominal=lambda: float(nominal_rows * every),
            compression=compression,
        )
        self._outer = OuterOptimizer(exchange, learning_rate, momentum)
        self._wide = tf.as_dtype(wide)
        self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._rows = tf.Variable(0, dtype=tf.int64, trainable=False)

    is_exact = False
    shared_variables = ()
    shards = None
    record = None
    mean_loss = None
    """None: each worker has its own losses, which are averaged by rows."""

    @contextmanager
    def install(self) -> Iterator[None]:
        """Average weights while the context is active; afterwards the model's step is restored."""
        model = self._model
        train_step = model.train_step
        if model.jit_compile:
            # XLA does not compile the average.
            train_step = tf.function(train_step, jit_compile=True, reduce_retracing=True)
        with disable_jit(model), override(model, "train_step", self._wrap_step(train_step)):
            model.make_train_function(force=True)
            yield
        model.make_train_function(force=True)

    def begin_training(self) -> None:
        """Start from the weights that all workers share."""
        self._outer.begin([v.numpy() for v in self._read_wide()])

    def begin_epoch(self) -> None:
        """Do nothing: steps are counted over the whole training."""

    def end_epoch(self) -> None:
        """Average weights after any further steps, so that callbacks see the same model."""
        if int(self._steps) % self._every:
            self._average()
            self._steps.assign(0)

    def read_state(self) -> dict[str, Any]:
        """Return the counters and the state of the outer optimizer, for a checkpoint."""
        counters = [int(self._steps), int(self._rows)]
        requested = self.agreement.is_requested
        return {"counters": counters, "requested": requested, "outer": self._outer.read_state()}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `read_state` returned."""
        for counter, value in zip([self._steps, self._rows], state["counters"], strict=True):
            counter.assign(value)
        self.agreement.is_requested = state["requested"]
        self._outer.restore_state(state["outer"])

    def _wrap_step(self, train_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            self._rows.assign_add(tf.cast(count_rows(data), tf.int64))
            return train_step(data)

        def skip() -> None:
            normalize_spectra(self._model)

        step_or_skip = StepOrSkip(self._model, step, skip) if self._may_be_empty else step

        def local_step(data: Any) -> Any:
            logs = step_or_skip(data)
            done = self._steps.assign_add(1)
            if tf.executing_eagerly():
                if int(done) % self._every == 0:
                    self._average()
            else:
                tf.cond(done % self._every == 0, self._average, lambda: None)
            return logs

        return local_step

    def _read_wide(self) -> list[Any]:
        values = [tf.convert_to_tensor(v) for v in self._model.trainable_variables]
        return [tf.cast(value, self._wide) for value in values]

    def _average(self) -> None:
        values = self._read_wide()
        types = [self._wide] * len(values)
        averages = tf.numpy_function(self._outer_step, [self._rows.read_value(), *values], types)
        variables = self._model.trainable_variables
        for variable, value, kind in zip(variables, averages, self._types, strict=True):
            value.set_shape(variable.shape)
            variable.assign(tf.cast(value, kind))
        self._rows.assign(0)

    def _outer_step(self, rows: Any, *weights: Array) -> list[Array]:
        try:
            return self._outer.step(float(rows), list(weights))
        except BaseException as error:
            self.error = self.error or error
            raise
