"""Choice of the synchronizer, which couples a model's steps to those of the other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from pybackend.core.collective.tensorflow import GraphReduce
from pybackend.core.engine.exchange import GradientExchange
from pybackend.core.engine.flat import StopAgreement
from pybackend.core.engine.global_batch import OverBatch, find_compiled_metrics
from pybackend.core.engine.graph import GraphExchange
from pybackend.core.engine.host import TransferSettings
from pybackend.core.engine.local_steps import WeightAveraging
from pybackend.core.engine.replica import Replica
from pybackend.core.engine.save import check_size
from pybackend.core.engine.shards import Shards
from pybackend.core.engine.step_clock import StepClock
from pybackend.core.engine.step_record import StepRecord, make_record
from pybackend.core.engine.steps import Position
from pybackend.core.job.messages import Note
from pybackend.core.job.worker_options import Exchange, LocalSteps
from pybackend.core.model.view import has_own
from pybackend.core.words import setting


class Synchronizer(Protocol):
    """Synchronization of the replicas of all workers during a ``fit``."""

    @property
    def agreement(self) -> Any:
        """Agreement to stop: a `StopAgreement`, or an object with the same attributes."""

    @property
    def is_exact(self) -> bool:
        """True if a step has the same result as in one process."""

    @property
    def error(self) -> BaseException | None:
        """Error in a step, or None: TensorFlow passes on only the text."""

    @property
    def mean_loss(self) -> float | None:
        """The epoch's loss, if a row-weighted mean of the workers' losses would be incorrect."""

    @property
    def shared_variables(self) -> Sequence[Any]:
        """Variables of metrics that are the same on all workers."""

    @property
    def record(self) -> StepRecord | None:
        """Record of the last exchanged step, from which training can continue after a loss."""

    @property
    def shards(self) -> Shards | None:
        """Parts of the optimizer's state, if this worker does not have the whole state."""

    def install(self) -> AbstractContextManager[None]:
        """Synchronize the model's steps while the context is active."""

    def begin_training(self) -> None:
        """Begin training, once all callbacks have begun and all weights are equal."""

    def begin_epoch(self) -> None:
        """Begin an epoch."""

    def end_epoch(self) -> None:
        """End an epoch, after its last step."""

    def read_state(self) -> dict[str, Any]:
        """Return this worker's state between steps, as plain data and arrays."""

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `read_state` returned, after `begin_training`."""


class NoExchange:
    """Synchronizer of a single worker, which does nothing."""

    is_exact = True
    mean_loss = None
    error = None
    shared_variables = ()
    shards = None

    def __init__(self, record: StepRecord | None) -> None:
        self.agreement = StopAgreement()
        self.record = record

    def install(self) -> AbstractContextManager[None]:
        """Leave the model unchanged."""
        return nullcontext()

    def begin_training(self) -> None:
        """Do nothing."""

    def begin_epoch(self) -> None:
        """Do nothing."""

    def end_epoch(self) -> None:
        """Do nothing."""

    def read_state(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


def make_synchronizer(replica: Replica, clock: StepClock) -> Synchronizer:
    """Make a job's synchronizer; this may turn off the model's ``jit_compile``, with a note."""
    view, model, feed = replica.view, replica.model, replica.feed
    job, collective = replica.job, replica.collective
    if collective.world_size == 1:
        # A single worker's checkpoints within an epoch are for any number of workers, too.
        needs_record = job.is_elastic and job.checkpoint is not None
        return NoExchange(_make_record(replica) if needs_record else None)
    nominal = collective.world_size * job.batch_size
    exchange = job.exchange
    if isinstance(exchange, LocalSteps):
        return WeightAveraging(
            model,
            clock.watch(collective),
            every=exchange.steps,
            learning_rate=exchange.learning_rate,
            momentum=exchange.momentum,
            may_be_empty=feed.may_be_empty,
            nominal_rows=nominal,
            compression=exchange.compression,
        )
    assert isinstance(exchange, Exchange)
    over_metrics = replica.metrics == "not sums"
    if model.jit_compile:
        reason = None
        if has_own(model, "train_step"):
            reason = "the exchange inside a custom train_step"
        elif view.synchronized:
            reason = f"the exchange of statistics for layers with {setting(synchronized=True)}"
        elif job.has_global_loss or over_metrics:
            reason = f"the exchange of outputs for the {'metrics' if over_metrics else 'loss'}"
        elif job.shards_optimizer:
            sharded = setting(shard_optimizer=True)
            reason = f"the exchange of the weights that other workers update ({sharded})"
        elif Position(feed).is_uneven:
            reason = "the exchange of row counts for each array of a batch"
        if reason is not None:
            replica.emit(Note(f"jit_compile is off: XLA cannot compile {reason}"))
            model.jit_compile = False
    # Layers exchange statistics during the backward pass: gradients are sent after it.
    bucket_bytes = float("inf") if view.synchronized else exchange.bucket_mb * 1e6
    settings = TransferSettings(nominal, bucket_bytes, exchange.compression)
    graph = None
    if exchange.transport == "tf":
        graph = GraphExchange(GraphReduce(job.workers, job.timeout), settings.bucket_bytes)
    return GradientExchange(
        view,
        collective,
        Position(feed),
        settings,
        feed.may_be_empty,
        graph,
        OverBatch(loss=job.has_global_loss, metrics=over_metrics),
        clock,
        _make_shards(replica) if job.shards_optimizer else None,
        _make_record(replica) if job.is_elastic else None,
    )


def _make_record(replica: Replica) -> StepRecord | None:
    over_metrics = find_compiled_metrics(replica.model) if replica.metrics == "not sums" else []
    return make_record(replica, [v for metric in over_metrics for v in metric.variables])


def _make_shards(replica: Replica) -> Shards:
    shards = Shards(
        replica.model,
        replica.collective,
        replica.loaded.stored,
        replica.loaded.extras.get("custom_objects"),
    )
    replica.emit(Note(shards.describe()))
    if replica.rank == 0:  # the file that was written for a check had no state
        weights = sum(v.numpy().nbytes for v in replica.model.weights)
        check_size(weights + shards.count_bytes(), replica.job)
    return shards
