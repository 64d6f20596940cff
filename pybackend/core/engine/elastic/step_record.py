"""Record of the last step that all workers exchanged, from which training continues after a loss.

A step of Keras updates weights and the optimizer's state only after the workers have exchanged
their gradients. A worker whose exchange fails has those of the step before. All else changes before
the exchange: metrics, statistics, random generators. So their values are recorded in each exchange.

A lost worker's metrics and statistics must not be lost with it: each exchange also sums them over
the workers, in the buffer of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.engine.batches import RowBatches
from pybackend.core.engine.replica import Replica
from pybackend.core.engine.state import find_other_state
from pybackend.core.engine.step_changes import count_accumulated_steps, override_each
from pybackend.core.job.messages import Note
from pybackend.core.model.view import has_own, list_other_variables
from pybackend.core.words import setting

Array = npt.NDArray[Any]
# The sums may take this share of the exchanged numbers, or this many numbers.
_SHARE = 0.02
_FEW = 1 << 14
_ABOUT_REPEATING = (
    "if a worker is lost, the others repeat the epoch from its beginning, not only a step: {}"
)
_ABOUT_CHECKPOINTS = ". Checkpoints are therefore only written at the end of an epoch"


@dataclass(frozen=True)
class StepValues:
    """Values after a step: the number of steps in its epoch so far, arrays, and sums."""

    step: int
    values: list[Array]
    sums: Array


class StepRecord:
    """Values of the variables that steps change before their exchange, after the last one.

    Parameters
    ----------
    shared
        Variables of metrics that are the same on all workers.

    Attributes
    ----------
    last
        Values after the last exchanged step of this epoch; None: these workers have not exchanged
        a step of this epoch yet.
    is_settled
        False while the workers compare or average variables after a step.
    has_ended
        True once the epoch's last step is done, and its end changes variables.
    """

    def __init__(self, replica: Replica, shared: Sequence[Any] = ()) -> None:
        self._replica = replica
        view = replica.view
        self._model = model = view.model
        self._batches = replica.batches
        self.last: StepValues | None = None
        self.is_settled, self.has_ended = True, False
        self._is_complete = True
        frozen = {id(v) for one in view.layers if not one.trainable for v in one.weights}
        synchronized = {id(v) for one in view.synchronized for v in one.weights}
        normalizing = view.normalizing_variables - synchronized - frozen
        same = {id(v) for v in shared}
        self._metrics = [v for v in model.metrics_variables if id(v) not in same]
        moving = [v for v in model.non_trainable_weights if id(v) not in frozen]
        self._statistics = [v for v in moving if id(v) in normalizing]
        others = [v for v in moving if id(v) not in normalizing]
        others += list_other_variables(model)
        others += [v for v in model.metrics_variables if id(v) in same]
        self._variables = [*self._metrics, *self._statistics, *others, *find_other_state(view)]
        self._places = {id(v): place for place, v in enumerate(self._variables)}
        self._before: list[Array] = []
        self.count = sum(
            int(np.prod(v.shape, dtype=np.int64)) for v in [*self._metrics, *self._statistics]
        )
        """Number of sums."""

    def begin_epoch(self) -> None:
        """Forget the steps of the epoch before."""
        self.last, self.is_settled, self.has_ended = None, True, False

    def begin_part(self) -> None:
        """Note the statistics with which these workers begin their part of an epoch."""
        self._before = [np.array(v.numpy()) for v in self._statistics]

    @contextmanager
    def settling(self) -> Iterator[None]:
        """The state is incomplete if this context fails."""
        self.is_settled = False
        yield
        self.is_settled = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Give up the record if the forward pass within this context assigns trainable weights.

        A worker whose exchange fails does not have their values of the step before.
        """

        def watch(variable: Any, assign: Any) -> Any:
            def watched(value: Any) -> Any:
                if self._is_complete:
                    self._is_complete = False
                    report_obstacle(self._replica, f"the forward pass changes {variable.path}")
                return assign(value)

            return watched

        with override_each(self._model.trainable_variables, "assign", watch):
            yield

    def read(self) -> list[Any]:
        """Return the variables' values, as tensors of the step being traced."""
        return [tf.convert_to_tensor(v) for v in self._variables]

    def weigh(self, step: int, values: Sequence[Array]) -> Array:
        """Return this worker's terms of the sums after a step, numbered from 0."""
        terms = [value.reshape(-1) for value in values[: len(self._metrics)]]
        if self._statistics:
            assert isinstance(self._batches, RowBatches)
            share = self._batches.share_until(step + 1)
            means = values[len(self._metrics) :][: len(self._statistics)]
            for mean, old in zip(means, self._before, strict=True):
                terms.append((mean - old.astype(float)).reshape(-1) * share)
        return np.concatenate([np.empty(0), *terms])

    def keep(self, step: int, values: Sequence[Array], sums: Array) -> None:
        """Record the values after a number of steps; TensorFlow may reuse their memory."""
        if not self._is_complete:
            return
        self.last = StepValues(step, [np.array(value) for value in values], sums)

    def replace(self, variables: Sequence[Any]) -> None:
        """Record the values on which the workers agreed after the step.

        A variable that is not recorded, such as a counter in a frozen layer, makes the record
        useless: the workers then repeat their part of the epoch after a loss.
        """
        if self.last is None:
            return
        if not all(id(variable) in self._places for variable in variables):
            self.last = None
            return
        for variable in variables:
            self.last.values[self._places[id(variable)]] = np.array(variable.numpy())

    def restore(self, last: StepValues) -> None:
        """Set the variables to recorded values; metrics and statistics are those of all workers."""
        for variable, value in zip(self._variables, last.values, strict=True):
            variable.assign(value)
        self._assign_sums(last)

    @contextmanager
    def combined(self) -> Iterator[None]:
        """Within this context, metrics and statistics are those of all workers."""
        summed = [*self._metrics, *self._statistics]
        own = [np.array(v.numpy()) for v in summed]
        if self.last is not None:
            self._assign_sums(self.last)
        try:
            yield
        finally:
            for variable, value in zip(summed, own, strict=True):
                variable.assign(value)

    def _assign_sums(self, last: StepValues) -> None:
        summed = [*self._metrics, *self._statistics]
        sizes = [int(np.prod(v.shape, dtype=np.int64)) for v in summed]
        parts = np.split(last.sums, np.cumsum(sizes)[:-1]) if summed else []
        # Only changes are averaged: what no worker changed has no rounding error.
        before = [0.0] * len(self._metrics) + [old.astype(float) for old in self._before]
        values = last.values[: len(summed)]
        for variable, part, old, own in zip(summed, parts, before, values, strict=True):
            variable.assign((old + part.reshape(own.shape)).astype(own.dtype))

    def empty_metrics(self) -> None:
        """Remove from this worker the metrics that another one has, for the sum over all."""
        for variable in self._metrics:
            variable.assign(np.zeros_like(variable.numpy()))


def make_record(replica: Replica, shared: Sequence[Any] = ()) -> StepRecord | None:
    """Return a record; if training cannot continue from it, report why, and return None.

    ``shared`` is as in `StepRecord`.
    """
    record = StepRecord(replica, shared)
    obstacle = find_obstacle(replica, record.count)
    if obstacle is not None:
        report_obstacle(replica, obstacle)
    return record if obstacle is None else None


def report_obstacle(replica: Replica, obstacle: str) -> None:
    """Report why training cannot continue after any step."""
    kept = replica.job.checkpoint
    also = _ABOUT_CHECKPOINTS if kept is not None and kept.every != "epoch" else ""
    replica.emit(Note(_ABOUT_REPEATING.format(obstacle) + also))


def find_obstacle(replica: Replica, count: int) -> str | None:
    """Return why training cannot continue after any step of this model; None if it can.

    Parameters
    ----------
    count
        Number of sums of a `StepRecord`.
    """
    model, batches = replica.model, replica.batches
    trained = sum(int(np.prod(v.shape, dtype=np.int64)) for v in model.trainable_weights)
    if not isinstance(batches, RowBatches):
        return "`data` is a function"
    if has_own(model, "train_step"):
        return "the model has its own train_step"
    if has_own(model, "compute_metrics"):
        return "the model has its own compute_metrics"
    if count_accumulated_steps(model.optimizer) > 1:
        return "the optimizer accumulates gradients over several steps"
    if int(model.steps_per_execution) > 1:
        count = int(model.steps_per_execution)
        return f"several steps run at once ({setting(steps_per_execution=count)})"
    if replica.view.has_masked_loss:
        return "masks reach the loss"
    if model.run_eagerly:
        return f"the model runs eagerly ({setting(run_eagerly=True)})"
    if count > max(_FEW, _SHARE * trained):
        return "its metrics have too many numbers to be exchanged in each step"
    return None
