"""Protocol that couples a model's steps to those of other workers, and its simpler cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.collective import Collective
from pybackend.core.engine.elastic.step_record import StepRecord
from pybackend.core.engine.exchange.flat_buffer import BufferLayout, FlatExchange, StopAgreement
from pybackend.core.engine.exchange.shards import Shards
from pybackend.core.engine.step_changes import (
    RemembersErrors,
    StepOrSkip,
    count_rows,
    normalize_spectra,
    override,
)
from pybackend.core.job.notice import Notice
from pybackend.core.job.worker_options import LocalSteps


class Synchronizer:
    """Synchronization of the replicas of all workers during a ``fit``; here, of a single worker.

    ``record`` has the last exchanged step, from which training can continue after a loss.
    ``shards`` are parts of the optimizer's state, if this worker does not have the whole state.
    """

    is_exact = True
    """True if a step has the same result as in one process."""

    def __init__(self, record: StepRecord | None = None, shards: Shards | None = None) -> None:
        self.record, self.shards = record, shards
        self.agreement: Any = StopAgreement()
        """Agreement to stop: a `StopAgreement`, or an object with the same attributes."""

    @property
    def error(self) -> BaseException | None:
        """Error in a step, or None: TensorFlow passes on only the text."""
        return None

    @property
    def mean_loss(self) -> float | None:
        """The epoch's loss, if a row-weighted mean of the workers' losses would be incorrect."""
        return None

    @property
    def shared_variables(self) -> Sequence[Any]:
        """Variables of metrics that are the same on all workers."""
        return ()

    def install(self) -> AbstractContextManager[None]:
        """Synchronize the model's steps while the context is active."""
        return nullcontext()

    def begin_training(self) -> None:
        """Begin training, once all callbacks have begun and all weights are equal."""

    def begin_epoch(self) -> None:
        """Begin an epoch."""

    def end_epoch(self) -> None:
        """End an epoch, after its last step."""

    def read_state(self) -> dict[str, Any]:
        """Return this worker's state between steps, as plain data and arrays."""
        return {}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `read_state` returned, after `begin_training`."""


class Preemption:
    """Preempted ranks: each knows about itself at once; all learn of others at the same step.

    With ``is_any_step``, they may leave before an epoch ends.
    """

    def __init__(self, collective: Collective, notice: Notice, is_any_step: bool) -> None:
        self._collective = collective
        self._notice = notice
        self._is_any_step = is_any_step
        self._preempted: tuple[int, ...] = ()

    @property
    def is_asked(self) -> bool:
        """True if this rank was preempted and requests that all leave before the epoch ends."""
        return self._is_any_step and self._notice()

    def agree(self, stops: bool, is_preempted: bool) -> bool:
        """Exchange the requests of all ranks; return whether any requests that training stop.

        A stop takes precedence over a preemption: training then ends normally.
        """
        everyone = np.stack(self._collective.all_gather(np.array([stops, is_preempted], np.int64)))
        is_stop = bool(everyone[:, 0].any())
        self._preempted = () if is_stop else tuple(np.flatnonzero(everyone[:, 1]).tolist())
        return is_stop

    def agree_at_end(self, stops: bool) -> bool:
        """Call `agree` at the end of an epoch, when all ranks may leave in any case."""
        return self.agree(stops, self._notice())

    def find_preempted(self, is_epoch_end: bool) -> tuple[int, ...]:
        """Return the preempted ranks that make all ranks leave now; the same on all ranks."""
        if not is_epoch_end and not self._is_any_step:
            return ()
        if self._collective.world_size == 1 and self._notice():
            return (0,)
        return self._preempted


Array = npt.NDArray[Any]


class WeightAveraging(RemembersErrors, Synchronizer):
    """Averaging of one model's weights over the workers, for the duration of a ``fit``.

    Replaces a `GradientExchange`. With ``skips``, some steps of a worker may have no rows;
    ``nominal`` is the number of rows of a step of all workers. Each worker has its own optimizer
    state, and its own losses, which are averaged by rows. Weights are averaged after every H steps,
    `LocalSteps.steps`, and at the end of each epoch.

    With v = momentum v + d for the mean change d of the weights since the last average, the weights
    become w - learning_rate (d + momentum v): Nesterov momentum. Learning rate 1 and momentum 0
    give the plain average. This takes two buffers, each as large as the weights: the last averaged
    weights, and v.
    """

    is_exact = False

    def __init__(
        self, model: Any, collective: Collective, options: LocalSteps, skips: bool, nominal: int
    ) -> None:
        super().__init__()
        self._model, self._options, self._skips = model, options, skips
        self._every = options.steps
        variables = model.trainable_variables
        self._types = [tf.as_dtype(v.dtype) for v in variables]
        wide = np.float64 if tf.float64 in self._types else np.float32
        shapes = [tuple(v.shape) for v in variables]
        layout = BufferLayout.of(shapes, np.dtype(wide).itemsize, float("inf"))
        self._exchange = FlatExchange(
            collective,
            layout,
            wide,
            self.agreement,
            nominal=lambda: float(nominal * options.steps),
            compression=options.compression,
        )
        self._last: list[Array] = []
        self._velocity: list[Array] = []
        self._wide = tf.as_dtype(wide)
        self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._rows = tf.Variable(0, dtype=tf.int64, trainable=False)

    @contextmanager
    def install(self) -> Iterator[None]:
        model = self._model
        train_step = model.train_step
        if model.jit_compile:
            # XLA does not compile the average.
            train_step = tf.function(train_step, jit_compile=True, reduce_retracing=True)
        step = self._wrap_step(train_step)
        with override(model, "jit_compile", False), override(model, "train_step", step):
            model.make_train_function(force=True)
            yield
        model.make_train_function(force=True)

    def begin_training(self) -> None:
        self._last = [np.array(v.numpy()) for v in self._read_wide()]
        self._velocity = [np.zeros_like(weight) for weight in self._last]

    def end_epoch(self) -> None:
        """Average weights after any further steps, so that callbacks see the same model."""
        if int(self._steps) % self._every:
            self._average()
            self._steps.assign(0)

    def read_state(self) -> dict[str, Any]:
        last, velocity = ([np.array(one) for one in own] for own in (self._last, self._velocity))
        outer = {"last": last, "velocity": velocity, "exchange": self._exchange.read_state()}
        counters = [int(self._steps), int(self._rows)]
        return {"counters": counters, "requested": self.agreement.is_requested, "outer": outer}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        for counter, value in zip([self._steps, self._rows], state["counters"], strict=True):
            counter.assign(value)
        self.agreement.is_requested = state["requested"]
        outer = state["outer"]
        self._last, self._velocity = outer["last"], outer["velocity"]
        self._exchange.restore_state(outer["exchange"])

    def _wrap_step(self, train_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            self._rows.assign_add(tf.cast(count_rows(data), tf.int64))
            return train_step(data)

        skip = partial(normalize_spectra, self._model)
        own = StepOrSkip(self._model, step, skip) if self._skips else step

        def local_step(data: Any) -> Any:
            logs = own(data)
            done = self._steps.assign_add(1)
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
        """Return new weights, the same on all workers.

        ``rows`` is the number of rows on which this worker has trained since the last average: the
        weight of this worker in the new one (McMahan et al., "Communication-efficient learning of
        deep networks from decentralized data", 2017).
        """
        momentum = self._options.momentum
        with self.remembering():
            change = [last - weight for last, weight in zip(self._last, weights, strict=True)]
            means, _ = self._exchange.exchange(float(rows), 0.0, change)
        for number, move in enumerate(means):
            kind = move.dtype
            if momentum:
                self._velocity[number] = momentum * self._velocity[number] + move
                move = move + momentum * self._velocity[number]
            new = self._last[number] - kind.type(self._options.learning_rate) * move
            self._last[number] = new.astype(kind, copy=False)
        # Copies, because TensorFlow retains the arrays.
        return [np.array(weight) for weight in self._last]
