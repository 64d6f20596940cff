"""Record of the last step that all workers exchanged, from which training continues after a loss.

A step of Keras updates weights and the optimizer's state only after the workers have exchanged
their gradients. A worker whose exchange fails has those of the step before. All else changes before
the exchange: metrics, statistics, random generators. So their values are recorded in each exchange.

A lost worker's metrics and statistics must not be lost with it: each exchange also sums them over
the workers, in the buffer of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.engine.equal_state import find_other_state
from pybackend.core.engine.step_changes import count_accumulated_steps, override_each
from pybackend.core.model.view import ModelView, has_own, list_other_variables
from pybackend.core.words import setting

Array = npt.NDArray[Any]

# The sums may take this share of the exchanged numbers, or this many numbers.
_SHARE = 0.02
_FEW = 1 << 14


@dataclass(frozen=True)
class StepValues:
    """Values after a step: the number of steps in its epoch so far, arrays, and sums."""

    step: int
    values: list[Array]
    sums: Array


class StepRecord:
    """Values of the variables that steps change before their exchange, after the last one.

    ``share_until`` is `RowBatches.share_until`, or None for a pipeline; ``give_up`` is called with
    a reason if it turns out that training cannot continue from the record; ``shared`` has variables
    of metrics that are the same on all workers.
    """

    def __init__(
        self,
        view: ModelView,
        share_until: Callable[[int], float] | None,
        give_up: Callable[[str], None],
        shared: Sequence[Any] = (),
    ) -> None:
        self._view = view
        self._model = model = view.model
        self._share_until, self._give_up = share_until, give_up
        self.last: StepValues | None = None
        """Values after the last exchanged step of this epoch; None: these workers have not
        exchanged a step of this epoch yet."""
        self.is_settled = True
        """False while the workers compare or average variables after a step."""
        self.has_ended = False
        """True once the epoch's last step is done, and its end changes variables."""
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
        self._summed = [*self._metrics, *self._statistics]
        self._variables = [*self._summed, *others, *find_other_state(view)]
        self._indices = {id(v): index for index, v in enumerate(self._variables)}
        self._before: list[Array] = []
        self.count = sum(map(_count_elements, self._summed))
        """Number of sums."""

    def begin_epoch(self) -> None:
        """Forget the steps of the epoch before."""
        self.last, self.is_settled, self.has_ended = None, True, False

    def begin_part(self) -> None:
        """Note the statistics with which these workers begin their part of an epoch."""
        self._before = [np.array(v.numpy()) for v in self._statistics]

    @contextmanager
    def settling(self) -> Iterator[None]:
        """The state is incomplete if this context fails: there is deliberately no ``finally``."""
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
                    self._give_up(f"the forward pass changes {variable.path}")
                return assign(value)

            return watched

        with override_each(self._model.trainable_variables, "assign", watch):
            yield

    def read(self) -> list[Any]:
        """Return the variables' values, as tensors of the step being traced."""
        return [tf.convert_to_tensor(v) for v in self._variables]

    def weigh(self, step: int, values: Sequence[Array]) -> Array:
        """Return this worker's terms of the sums after a step, numbered from 0."""
        count, share = len(self._metrics), 0.0
        if self._statistics:
            assert self._share_until is not None
            share = self._share_until(step + 1)
        means = zip(values[count : len(self._summed)], self._before, strict=True)
        changes = [(mean - old.astype(float)) * share for mean, old in means]
        terms = [value.reshape(-1) for value in [*values[:count], *changes]]
        return np.concatenate([np.empty(0), *terms])

    def keep(self, step: int, values: Sequence[Array], sums: Array) -> None:
        """Record the values after a number of steps; TensorFlow may reuse their memory."""
        if self._is_complete:
            self.last = StepValues(step, [np.array(value) for value in values], sums)

    def replace(self, variables: Sequence[Any]) -> None:
        """Record the values on which the workers agreed after the step.

        A variable that is not recorded, such as a counter in a frozen layer, makes the record
        useless: the workers then repeat their part of the epoch after a loss.
        """
        if self.last is None:
            return
        if not all(id(variable) in self._indices for variable in variables):
            self.last = None
            return
        for variable in variables:
            self.last.values[self._indices[id(variable)]] = np.array(variable.numpy())

    def restore(self, last: StepValues) -> None:
        """Set the variables to recorded values; metrics and statistics are those of all workers."""
        for variable, value in zip(self._variables, last.values, strict=True):
            variable.assign(value)
        self._assign_sums(last)

    @contextmanager
    def combined(self) -> Iterator[None]:
        """Within this context, metrics and statistics are those of all workers."""
        own = [np.array(v.numpy()) for v in self._summed]
        if self.last is not None:
            self._assign_sums(self.last)
        try:
            yield
        finally:
            for variable, value in zip(self._summed, own, strict=True):
                variable.assign(value)

    def _assign_sums(self, last: StepValues) -> None:
        sizes = [_count_elements(v) for v in self._summed]
        parts = np.split(last.sums, np.cumsum(sizes)[:-1]) if sizes else []
        # Only changes are averaged: what no worker changed has no rounding error.
        before = [0.0] * len(self._metrics) + [old.astype(float) for old in self._before]
        values = last.values[: len(sizes)]
        for variable, part, old, own in zip(self._summed, parts, before, values, strict=True):
            variable.assign((old + part.reshape(own.shape)).astype(own.dtype))

    def empty_metrics(self) -> None:
        """Remove from this worker the metrics that another one has, for the sum over all."""
        for variable in self._metrics:
            variable.assign(np.zeros_like(variable.numpy()))

    def find_obstacle(self) -> str | None:
        """Return why training cannot continue after any step of this model; None if it can."""
        model, at_once = self._model, int(self._model.steps_per_execution)
        trained = sum(map(_count_elements, model.trainable_weights))
        is_large = self.count > max(_FEW, _SHARE * trained)
        adds_up = count_accumulated_steps(model.optimizer) > 1
        found = {
            "`data` is a function": self._share_until is None,
            "the model has its own train_step": has_own(model, "train_step"),
            "the model has its own compute_metrics": has_own(model, "compute_metrics"),
            "the optimizer accumulates gradients over several steps": adds_up,
            f"several steps run at once ({setting(steps_per_execution=at_once)})": at_once > 1,
            "masks reach the loss": self._view.has_masked_loss,
            f"the model runs eagerly ({setting(run_eagerly=True)})": model.run_eagerly,
            "its metrics have too many numbers to be exchanged in each step": is_large,
        }
        return next((reason for reason, is_so in found.items() if is_so), None)


def _count_elements(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))
