"""Callbacks that keep all workers in the same state, and end training together on preemption."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Mesh, all_sum, is_true_anywhere
from pybackend.core.collective.mesh import USUAL_BUCKET
from pybackend.core.collective.tensorflow import GraphReduce
from pybackend.core.engine import equal_state
from pybackend.core.engine.elastic.step_record import StepRecord
from pybackend.core.engine.exchange.flat_buffer import TransferSettings
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.exchange.shards import Shards
from pybackend.core.engine.exchange.synchronizer import Preemption, Synchronizer, WeightAveraging
from pybackend.core.engine.exchange.transports import GraphExchange
from pybackend.core.engine.replica import Replica
from pybackend.core.engine.row_batches import RowBatches
from pybackend.core.engine.save import check_size
from pybackend.core.engine.statistics.global_batch import OverBatch, find_compiled_metrics
from pybackend.core.engine.statistics.metrics import combine_logs, find_custom_metrics
from pybackend.core.engine.step_changes import Position
from pybackend.core.engine.step_clock import StepClock
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.messages import EpochEnded, Note
from pybackend.core.job.worker_options import Exchange, LocalSteps
from pybackend.core.machine.capacity import count_cores
from pybackend.core.model.callbacks import find_unmonitored, runs_in_steps
from pybackend.core.model.view import ModelView, has_own
from pybackend.core.words import setting, show

_ABOUT_REPEATING = (
    "if a worker is lost, the others repeat the epoch from its beginning, not only a step: {}"
)
_ABOUT_CHECKPOINTS = ". Checkpoints are therefore only written at the end of an epoch"


def make_synchronizer(replica: Replica, clock: StepClock) -> Synchronizer:
    """Make a job's synchronizer; this may turn off the model's ``jit_compile``, with a note."""
    view, model, batches = replica.view, replica.model, replica.batches
    job, collective = replica.job, replica.collective
    if collective.world_size == 1:
        # A single worker's checkpoints within an epoch are for any number of workers, too.
        needs_record = job.is_elastic and job.checkpoint is not None
        return Synchronizer(_make_record(replica) if needs_record else None)
    nominal = collective.world_size * job.batch_size
    exchange = job.exchange
    if isinstance(exchange, LocalSteps):
        watched = clock.watch(collective)
        return WeightAveraging(model, watched, exchange, batches.may_be_empty, nominal)
    assert isinstance(exchange, Exchange)
    over_metrics = replica.metrics == "not sums"
    reason = _why_not_compiled(replica, over_metrics) if model.jit_compile else None
    if reason is not None:
        replica.emit(Note(f"jit_compile is off: XLA cannot compile the exchange {reason}"))
        model.jit_compile = False
    settings = TransferSettings(
        nominal, _find_bucket_bytes(replica, exchange), exchange.compression
    )
    graph = None
    if exchange.transport == "tf":
        graph = GraphExchange(GraphReduce(job.workers, job.timeout), settings.bucket_bytes)
    return GradientExchange(
        view,
        collective,
        Position(batches),
        settings,
        batches.may_be_empty,
        graph=graph,
        over=OverBatch(loss=job.has_global_loss, metrics=over_metrics),
        clock=clock,
        shards=_make_shards(replica) if job.shards_optimizer else None,
        record=_make_record(replica) if job.is_elastic else None,
    )


def _find_bucket_bytes(replica: Replica, exchange: Exchange) -> float:
    """Return the size of a bucket, the same on all workers."""
    if replica.view.synchronized:
        # Layers exchange statistics during the backward pass: gradients are sent after it.
        return float("inf")
    if exchange.bucket_mb is not None:
        return exchange.bucket_mb * 1e6
    # Checkpoints have the rounding errors of each bucket, so the network must not matter.
    is_fixed = exchange.compression is not None or exchange.transport == "tf"
    if is_fixed or not isinstance(replica.collective, Mesh):
        return USUAL_BUCKET
    is_busy = os.environ.get("TF_NUM_INTRAOP_THREADS") == "1"
    is_busy &= count_cores() <= replica.collective.world_size
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    return replica.collective.choose_bucket_bytes(has_gpu or not is_busy)


def _why_not_compiled(replica: Replica, over_metrics: bool) -> str | None:
    """Return which exchange happens within a part of the step that XLA would compile."""
    job, sharded = replica.job, setting(shard_optimizer=True)
    found = {
        "inside a custom train_step": has_own(replica.model, "train_step"),
        f"of statistics for layers with {setting(synchronized=True)}": replica.view.synchronized,
        "of outputs for the metrics": over_metrics,
        "of outputs for the loss": job.has_global_loss,
        f"of the weights that other workers update ({sharded})": job.shards_optimizer,
        "of row counts for each array of a batch": replica.batches.is_uneven,
    }
    return next((reason for reason, is_so in found.items() if is_so), None)


def _make_record(replica: Replica) -> StepRecord | None:
    """Return a record; if training cannot continue from it, report why, and return None."""
    batches, options = replica.batches, replica.job.checkpoint

    def give_up(obstacle: str) -> None:
        also = _ABOUT_CHECKPOINTS if options is not None and options.every != "epoch" else ""
        replica.emit(Note(_ABOUT_REPEATING.format(obstacle) + also))

    share_until = batches.share_until if isinstance(batches, RowBatches) else None
    over_batch = find_compiled_metrics(replica.model) if replica.metrics == "not sums" else []
    shared = [v for metric in over_batch for v in metric.variables]
    record = StepRecord(replica.view, share_until, give_up, shared)
    if (obstacle := record.find_obstacle()) is None:
        return record
    give_up(obstacle)
    return None


def _make_shards(replica: Replica) -> Shards:
    known = replica.loaded.extras.get("custom_objects")
    shards = Shards(replica.model, replica.collective, replica.loaded.stored, known)
    replica.emit(Note(shards.describe()))
    if replica.rank == 0:  # the file that was written for a check had no state
        weights = sum(v.numpy().nbytes for v in replica.model.weights)
        check_size(weights + shards.count_bytes(), replica.job)
    return shards


_ABOUT_DRIFT = (
    "weights of the workers differed by {:.1g} of their norm after an epoch: GPUs add up numbers "
    "in no fixed order. After each epoch all workers continue with worker 0's weights"
)


class EpochSync(keras.callbacks.Callback):
    """First of the callbacks: the others get metrics over the rows of all workers."""

    def __init__(self, replica: Replica, synchronizer: Synchronizer) -> None:
        super().__init__()
        self._replica, self._synchronizer = replica, synchronizer
        self._collective, self._batches = replica.collective, replica.batches
        self._is_exact = synchronizer.is_exact and replica.collective.world_size > 1
        # Values of statistics that the workers agreed on last, by their position among the weights:
        # a callback may freeze or unfreeze layers meanwhile.
        self._agreed: dict[int, Any] = {}
        # Variables other than the model's weights, and all by their positions: weights first.
        # Listing them takes longer than a small step.
        self._others: list[Any] = []
        self._variables: list[Any] = []
        # A first step may create some, and searching for them takes time.
        self._searches = 2
        # Positions of variables that steps of this epoch change; None: not known yet.
        self._moving: list[int] | None = None
        self._has_reported_metrics = replica.collective.world_size == 1
        self._has_reported_monitors = False
        self._began, self._steps = 0.0, 0
        self.steps_done = 0
        """Steps of all epochs so far."""
        self.evaluated_by: Sequence[Any] = ()
        """Callbacks that get the results of the validation."""

    def read_state(self) -> dict[str, Any]:
        """Return state for a checkpoint: statistics at the beginning of the epoch, and steps."""
        return {"agreed": self._agreed, "steps": self._steps, "steps_done": self.steps_done}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        self._agreed, self._steps = state["agreed"], state["steps"]
        self.steps_done = state["steps_done"]

    def begin_part(self) -> None:
        """Begin an epoch, or another worker group's part of it: all ranks have the same values."""
        state = {id(v) for v in [*equal_state.find_statistics(self.model), *self._others]}
        variables = enumerate(self._variables)
        self._agreed = {n: np.array(v.numpy()) for n, v in variables if id(v) in state}
        self._moving = None
        if self._synchronizer.record is not None:
            self._synchronizer.record.begin_part()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # A callback that restores an epoch on one rank only (BackupAndRestore) would make the ranks
        # wait for exchanges that never come.
        epochs = all_sum(self._collective, [epoch])[0] / self._collective.world_size
        if epochs != epoch:
            raise ClusterError(
                f"worker {self._collective.rank} begins epoch {epoch + 1}, but others do not: a "
                "callback restored them to different epochs"
            )
        self._batches.begin_epoch(epoch)
        self._synchronizer.begin_epoch()
        if self._searches and self._is_exact:
            self._searches -= 1
            self._others = equal_state.find_other_state(ModelView(self.model))
        self._variables = [*self.model.weights, *self._others]
        self.begin_part()
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The last of several steps per execution may lie beyond the epoch's end.
        self._steps = min(batch + 1, self._batches.steps)
        self._batches.count_steps(self._steps)
        if self._is_exact:
            record = self._synchronizer.record
            with record.settling() if record else nullcontext():
                self._average_own_state()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = {} if logs is None else logs
        job, validation = self._replica.job, self._replica.validation
        if self._synchronizer.record is not None:
            self._synchronizer.record.has_ended = True
        if not self._has_reported_metrics:
            self._report_custom_metrics()
        self._synchronizer.end_epoch()
        self.steps_done += self._steps
        combined = self.merge_logs(logs, self._steps - 1)
        if self._synchronizer.mean_loss is not None and "loss" in combined:
            combined["loss"] = self._synchronizer.mean_loss
        self.agree_on_statistics()
        if validation is not None and job.validates(epoch):
            metrics = validation.evaluate(self.evaluated_by)
            combined |= {f"val_{name}": value for name, value in metrics.items()}
        logs.clear()
        logs.update(combined)
        if not self._has_reported_monitors and (validation is None or job.validates(epoch)):
            self._report_unmonitored(logs)
        seconds = time.monotonic() - self._began
        self._replica.emit(EpochEnded(epoch + 1, job.epochs, seconds, combined))

    def _report_custom_metrics(self) -> None:
        # Not before an epoch: Keras builds the metrics in its first step.
        self._has_reported_metrics = True
        for name in find_custom_metrics(self.model, self._replica.metrics != "unknown"):
            text = (
                f"metric {show(name)} has a custom class: its variables are summed over the "
                "workers, which is correct only for sums and counts"
            )
            self._replica.emit(Note(text))

    def _report_unmonitored(self, logs: Mapping[str, Any]) -> None:
        self._has_reported_monitors = True
        lacks = " without validation data" if self._replica.validation is None else ""
        for kind, monitor in find_unmonitored(self.evaluated_by, logs):
            text = (
                f"{kind} monitors {show(monitor)}, which is not available{lacks}: it has no "
                f"effect. The available metrics are {', '.join(map(show, logs))}"
            )
            self._replica.emit(Note(text))

    def merge_logs(self, logs: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the logs of all workers after a step; the metrics become those of all workers."""
        rows = self._batches.rows_at(step)
        shared = self._synchronizer.shared_variables
        return combine_logs(self.model, logs, self._collective, rows, shared)

    def list_merged(self) -> list[tuple[Any, Any]]:
        """Return the statistics that the end of an epoch merges, and their values before it.

        Only their change is averaged, so weights that do not change, such as those of frozen
        layers, stay identical.
        """
        weights = len(self._variables) - len(self._others)
        return [
            (self._variables[n], last)
            for n, last in self._agreed.items()
            if last.dtype.kind not in "iu" and n < weights
        ]

    def agree_on_statistics(self) -> None:
        """Average the changes of batch normalization's statistics, weighted by rows."""
        if self._collective.world_size == 1:
            return
        share = self._batches.share()
        for variable, last in self.list_merged():
            before = last.astype(np.float64)
            change = (variable.numpy().astype(np.float64) - before) * share
            variable.assign((before + all_sum(self._collective, change)).astype(last.dtype))

    def _average_own_state(self) -> None:
        """Make the state that a step changes equal to that of one process, after each step.

        This is correct for state that changes by a mean over rows (moving averages, codebooks) and
        for state that does not depend on the rows (counters), even if a worker has no rows. The
        state of batch normalization comes from each worker's own rows, and is averaged at the end
        of the epoch.
        """
        variables = self._variables
        if self._moving is None:
            normalizing = ModelView(self.model).normalizing_variables
            indices = [n for n in self._agreed if id(variables[n]) not in normalizing]
            has_moved = [
                not np.array_equal(variables[n].numpy(), self._agreed[n], equal_nan=True)
                for n in indices
            ]
            counts = all_sum(self._collective, [0, *has_moved])[1:]
            self._moving = [n for n, count in zip(indices, counts, strict=True) if count]
        if not self._moving:
            return
        rows = self._batches.rows_at(self._steps - 1)
        before = {n: self._agreed[n].astype(np.float64) for n in self._moving}
        changes = [(variables[n].numpy().astype(np.float64) - last) for n, last in before.items()]
        changes = [change.reshape(-1) for change in changes]
        everyone = np.stack(self._collective.all_gather(np.concatenate(changes)))
        change = np.average(everyone, axis=0, weights=rows)
        takers = everyone[np.asarray(rows) > 0]
        is_same = np.all(takers == takers[0], axis=0)
        change[is_same] = takers[0][is_same]
        parts = np.split(change, np.cumsum([len(part) for part in changes])[:-1])
        for (n, last), part in zip(before.items(), parts, strict=True):
            self._agreed[n] = (last + part.reshape(last.shape)).astype(self._agreed[n].dtype)
            variables[n].assign(self._agreed[n])
        if self._synchronizer.record is not None:
            self._synchronizer.record.replace([variables[n] for n in self._moving])


class StopTogether(keras.callbacks.Callback):
    """Last of the callbacks: if one rank requests a stop, all stop after the same step.

    A rank that stopped alone in the middle of an epoch would miss exchanges that the others are
    waiting for.

    If a custom callback may stop training in the middle of an epoch, on any rank, each step ends
    with an exchange of all workers; other requests are sent with the exchange of the next step.
    """

    def __init__(
        self, replica: Replica, synchronizer: Synchronizer, preemption: Preemption | None
    ) -> None:
        super().__init__()
        self._emit, self._collective = replica.emit, replica.collective
        # These may request a stop after any step, not only after an epoch.
        ends = [one for one in replica.callbacks if isinstance(one, keras.callbacks.TerminateOnNaN)]
        self._asks_each_step = bool(ends) or any(map(runs_in_steps, replica.callbacks))
        self._has_drifted = False
        self._preemption, self._synchronizer = preemption, synchronizer
        self._agreement, self._shards = synchronizer.agreement, synchronizer.shards

    def on_train_begin(self, logs: Any = None) -> None:
        self._optimizer = self.model.optimizer
        # Not before: the user's callbacks may have loaded weights and optimizer state.
        self._synchronizer.begin_training()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.model.optimizer is not self._optimizer or self.model.train_function is None:
            raise InputError(
                f"before epoch {epoch + 1} a callback called compile(), but the workers exchange "
                "gradients in the optimizer and the function that were compiled before. Train in "
                "two calls: first up to that epoch, then compile `result.model` and train it with "
                f"`{setting(initial_epoch=epoch)}`"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._asks_each_step and is_true_anywhere(self._collective, self.model.stop_training):
            self.model.stop_training = True
            return
        agreement = self._agreement
        # The request is sent with the next exchange; all ranks receive it in the same step.
        is_agreed = agreement.is_agreed
        if self._preemption is not None:
            if is_agreed:
                is_agreed = self._preemption.agree(agreement.is_requested, agreement.is_preempted)
            if self._preemption.is_asked and not agreement.is_preempted:
                agreement.is_preempted = True
        if self.model.stop_training:
            agreement.is_requested = True
        self.model.stop_training = is_agreed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        asked = self._agreement.is_requested or bool(self.model.stop_training)
        if self._preemption is None:
            self.model.stop_training = is_true_anywhere(self._collective, asked)
        else:
            self.model.stop_training = self._preemption.agree_at_end(asked)
        # The weights of other parts are equal in any case; what they were made with may not be.
        common = self._shards.common if self._shards else ()
        differing = equal_state.find_differing_weights(self.model, self._collective, common)
        if differing and equal_state.uses_gpus(self._collective):
            whole = self.model, self._collective, self._shards is not None
            differing, size = equal_state.undo_drift(*whole)
            if not self._has_drifted and not differing:
                self._emit(Note(_ABOUT_DRIFT.format(size)))
            self._has_drifted = True
        if differing:
            raise ClusterError(
                f"after epoch {epoch + 1} the variable {show(min(differing.values()))} of worker "
                f"{', '.join(map(str, differing))} differs from that of worker 0: a callback, a "
                "layer or a custom train_step changed it on only one worker"
            )
