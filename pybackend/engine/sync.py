"""Callbacks that keep all workers on one state: metrics, statistics and stops at each epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from pybackend.collective import Collective, all_sum
from pybackend.engine.feed import Feed
from pybackend.engine.held_out import HeldOut
from pybackend.engine.leaving import Leaving
from pybackend.engine.metrics import combine_logs, find_custom_metrics
from pybackend.engine.pipeline_feed import PipelineFeed
from pybackend.engine.state import find_differing_weights, find_statistics
from pybackend.engine.synchronizer import Synchronizer
from pybackend.engine.trials import MetricsKind
from pybackend.errors import ClusterError, InputError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, EpochEnded, Note


class EpochSync(keras.callbacks.Callback):
    """First of the callbacks: the others see figures over the rows of all workers."""

    def __init__(
        self,
        job: Job,
        collective: Collective,
        synchronizer: Synchronizer,
        feed: Feed | PipelineFeed,
        held_out: HeldOut | None,
        emit: Emit,
        metrics: MetricsKind,
    ) -> None:
        super().__init__()
        self._job = job
        self._collective = collective
        self._synchronizer = synchronizer
        self._feed = feed
        self._held_out = held_out
        self._emit = emit
        self._metrics = metrics
        # Values of statistics as the epoch began, by their place among the weights: a callback may
        # freeze or thaw layers meanwhile.
        self._agreed: dict[int, Any] = {}
        self._has_reported_metrics = False
        self._began = 0.0
        self._steps = 0
        self.steps_done = 0
        """Steps of all epochs so far."""
        self.evaluated_by: Sequence[Any] = ()
        """Callbacks that see the validation."""

    def read_state(self) -> dict[str, Any]:
        """What a checkpoint has to know: the statistics that this epoch began with, and steps."""
        return {"agreed": self._agreed, "steps": self._steps, "steps_done": self.steps_done}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `read_state` returned."""
        self._agreed, self._steps = state["agreed"], state["steps"]
        self.steps_done = state["steps_done"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        epochs = all_sum(self._collective, [epoch])[0] / self._collective.world_size
        if epochs != epoch:
            raise ClusterError(
                f"worker {self._collective.rank} begins epoch {epoch + 1}, others do not: a "
                "callback has restored them to different epochs"
            )
        self._feed.begin_epoch(epoch)
        self._synchronizer.begin_epoch()
        statistics = {id(v) for v in find_statistics(self.model)}
        weights = enumerate(self.model.weights)
        self._agreed = {n: np.array(v.numpy()) for n, v in weights if id(v) in statistics}
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The last of several steps per execution may lie beyond the epoch's end.
        self._steps = min(batch + 1, self._feed.steps)
        self._feed.count_steps(self._steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = {} if logs is None else logs
        if not self._has_reported_metrics and self._collective.world_size > 1:
            self._report_custom_metrics()
        self._synchronizer.end_epoch()
        self.steps_done += self._steps
        rows = self._feed.rows_at(self._steps - 1)
        shared = self._synchronizer.shared_variables
        combined = combine_logs(self.model, logs, self._collective, rows, shared)
        if self._synchronizer.mean_loss is not None and "loss" in combined:
            combined["loss"] = self._synchronizer.mean_loss
        self._agree_on_statistics()
        if self._held_out is not None and self._job.validates(epoch):
            figures = self._held_out.evaluate(self.model, self._collective, self.evaluated_by)
            combined.update({f"val_{name}": value for name, value in figures.items()})
        logs.clear()
        logs.update(combined)
        seconds = time.monotonic() - self._began
        self._emit(EpochEnded(epoch + 1, self._job.epochs, seconds, dict(logs)))

    def _report_custom_metrics(self) -> None:
        # Not before an epoch: Keras builds the metrics in its first step.
        self._has_reported_metrics = True
        for name in find_custom_metrics(self.model, self._metrics != "unknown"):
            text = (
                f"metric {name!r} is of a custom class: its variables are summed over the "
                "workers, which is right for sums and counts only"
            )
            self._emit(Note(text))

    def _agree_on_statistics(self) -> None:
        """Average what the forward pass has moved (batch normalization), weighted by rows.

        Only the change since the epoch began is averaged, so weights that do not move, such
        as frozen layers', keep their bits.
        """
        if self._collective.world_size == 1:
            return
        share = self._feed.share()
        weights = self.model.weights
        for place, last in self._agreed.items():
            variable = weights[place]
            before = last.astype(np.float64)
            change = (np.array(variable.numpy()).astype(np.float64) - before) * share
            agreed = before + all_sum(self._collective, change)
            variable.assign(agreed.astype(last.dtype))


class StopTogether(keras.callbacks.Callback):
    """Last of the callbacks: if one rank has asked to stop, all do, after the same step.

    A rank that left an epoch by itself would miss the exchanges that the others wait for.
    """

    def __init__(
        self, collective: Collective, synchronizer: Synchronizer, leaving: Leaving | None = None
    ) -> None:
        super().__init__()
        self._collective = collective
        self._leaving = leaving
        self._agreement = synchronizer.agreement
        self._synchronizer = synchronizer

    def on_train_begin(self, logs: Any = None) -> None:
        self._optimizer = self.model.optimizer
        self._synchronizer.begin_training()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.model.optimizer is not self._optimizer or self.model.train_function is None:
            raise InputError(
                f"before epoch {epoch + 1} a callback called compile(), but the workers exchange "
                "gradients in the optimizer and the function that were compiled before. Train in "
                "two calls: up to there, then compile `result.model` and train it with "
                f"`initial_epoch={epoch}`"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        agreement = self._agreement
        # The request travels with the next exchange; all ranks receive it in the same step.
        is_agreed = agreement.is_agreed
        if self._leaving is not None:
            if is_agreed:
                is_agreed = self._leaving.agree(agreement.is_requested, agreement.is_told)
            if self._leaving.is_asked and not agreement.is_told:
                agreement.is_told = True
        if self.model.stop_training:
            agreement.is_requested = True
        self.model.stop_training = is_agreed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        asked = self._agreement.is_requested or bool(self.model.stop_training)
        if self._leaving is None:
            self.model.stop_training = bool(all_sum(self._collective, [float(asked)])[0])
        else:
            self.model.stop_training = self._leaving.agree_at_end(asked)
        differing = find_differing_weights(self.model, self._collective)
        if differing:
            raise ClusterError(
                f"after epoch {epoch + 1} the variable {min(differing.values())!r} of worker "
                f"{', '.join(map(str, differing))} differs from that of worker 0: a callback, a "
                "layer or a custom train_step has changed it on one worker only"
            )
