"""Elastic training: one generation of workers after another.

After a loss, training continues from the state of the worker that got furthest: some workers may
have completed a step in which others lost their peer.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pybackend.core.collective import Collective, broadcast_bytes
from pybackend.core.data.checkpoint_store import new_run
from pybackend.core.data.reading import read_all_sources
from pybackend.core.data.sharding import count_sharded
from pybackend.core.engine.checkpoint import training_state
from pybackend.core.engine.checkpoint.checkpointing import Checkpoints, Saver
from pybackend.core.engine.elastic.step_record import StepRecord, StepValues
from pybackend.core.engine.equal_state import offset_seeds
from pybackend.core.engine.exchange.synchronizer import Preemption, Synchronizer
from pybackend.core.engine.lifecycle import (
    Lifecycle,
    build_what_is_restored,
    continue_checkpoints,
    describe_replica,
    open_checkpoints,
    share_first_weights,
    wait_for_all,
)
from pybackend.core.engine.replica import Replica
from pybackend.core.engine.row_batches import RowBatches
from pybackend.core.engine.train import Training, train
from pybackend.core.errors import PeerLostError
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Answers, Emit, Note, Order, Standby
from pybackend.core.job.notice import LeftError, Notice
from pybackend.core.job.report import Audit, find_groups_before
from pybackend.core.job.storage_options import Checkpoint
from pybackend.core.job.value_codec import decode_state, encode_state
from pybackend.core.model.callbacks import counts_steps, select_callbacks
from pybackend.core.model.compile_settings import describe_rate
from pybackend.core.model.transfer import LoadedModel, load_job_model
from pybackend.core.model.view import has_own
from pybackend.core.net.rendezvous import address_of, listen


class GroupChangesError(Exception):
    """End of an epoch after which the workers form a new generation."""


Groups = tuple[tuple[int, int], ...]
"""As in `sharding`, but a tuple: it is compared with those of other workers."""
_ABOUT_FILES = (
    "these callbacks ran only on a worker that no longer is rank 0, and continue with their state "
    "from the beginning of the epoch: {}"
)


@dataclass(frozen=True)
class EpochState:
    """State as returned by `TrainingState.read`, at the beginning of an epoch or after some steps.

    ``groups`` are as in `Standby`. Without ``is_own`` another worker sent it: it then has the
    random generators of that worker.
    """

    epoch: int
    state: bytes = field(repr=False)
    groups: Groups = ()
    is_own: bool = True

    @property
    def position(self) -> tuple[int, Groups]:
        """Epoch and groups: the larger, the further."""
        return self.epoch, self.groups


@dataclass
class Memory:
    """State of a worker that lasts from one generation to the next."""

    member: int
    """The worker's unique number; its rank when it was started."""
    loaded: LoadedModel
    is_asked: Callable[[], bool]
    """Returns whether another worker is waiting to join."""
    notice: Notice = field(default_factory=Notice)
    first: dict[int, dict[str, str]] = field(default_factory=dict)
    """Attributes of callbacks before training, as in `TrainingState`."""
    rate: Any = None
    """The model's learning rate before training, as in `describe_rate`."""
    kept: EpochState | None = None
    """Where the current epoch, or this group's part of it, began, once every worker has stored it;
    after a loss, the last complete step."""
    next: EpochState | None = None
    """The beginning of an epoch that some workers may not have stored yet."""
    is_seeded: bool = False
    """True if this process already has its own random numbers."""
    is_own: bool = False
    """True if the state that the generation began with is that of this process."""
    is_first: bool = False
    """True if this process was rank 0 in the last generation."""
    audit: Audit = field(default_factory=Audit)
    """Results of the audits of all generations that this process belonged to."""
    checkpoints: Checkpoints | None = None
    """The checkpoints that this process writes, as long as it is rank 0."""
    run: str = ""
    """As in `CheckpointStore`; the same in all workers."""


class ElasticLifecycle(Lifecycle):
    """One worker group's part of elastic training.

    ``memory`` has what this worker had in earlier groups; ``order`` is where training resumes.
    """

    def __init__(self, job: TrainingJob, memory: Memory, order: Order) -> None:
        super().__init__(job)
        self.memory, self.audit = memory, memory.audit
        self._order, self.groups = order, order.groups
        self._keeper: EpochKeeper | None = None

    def seed(self, rank: int) -> None:
        """Seed random numbers once in this process, by the unique number of the worker."""
        if not self.memory.is_seeded:
            super().seed(self.memory.member)

    def begin(self, replica: Replica) -> None:
        """Return to a step, or the beginning of an epoch, and prepare the replica for it."""
        self.start = self._go_back(replica.collective)
        if self.job.checkpoint is not None:
            self._open_checkpoints(replica, self.job.checkpoint)
            # A worker that was preempted leaves after the epoch; it may be killed before.
            is_any_step = isinstance(replica.batches, RowBatches)
            self.preemption = Preemption(replica.collective, self.memory.notice, is_any_step)
        if self.start.state is not None:
            replica.batches.resume(self.job.initial_epoch)
        if self.start.is_within_epoch:
            assert isinstance(replica.batches, RowBatches)
            replica.batches.continue_epoch(self.start.epoch, self.groups)
        if not has_own(replica.model, "train_step"):
            build_what_is_restored(replica)
        self.memory.notice.expect()

    def share_state(self, replica: Replica) -> None:
        """Send rank 0's weights to all ranks; a group that repeats an epoch restores them later."""
        if not self.memory.is_seeded:
            offset_seeds(replica.model, self.memory.member)
            self.memory.is_seeded = True
        if replica.collective.world_size > 1 and self._order.epoch is None:
            share_first_weights(replica)

    def make_callbacks(
        self, replica: Replica, sync: training_state.StatefulSync, synchronizer: Synchronizer
    ) -> list[Any]:
        """Return the callbacks that store each epoch's beginning and restore it."""
        memory = self.memory
        stateful = training_state.keep_callbacks(replica.rank, replica.callbacks)
        is_first, memory.is_first = memory.is_first, replica.rank == 0
        if self.start.is_within_epoch and memory.is_first and not is_first and memory.kept:
            _report_files(replica)
        state = training_state.TrainingState(
            replica.model, sync, synchronizer, stateful, memory.first, is_elastic=True
        )
        if self._checkpoints is not None:
            whole = self.job.epochs, replica.collective, replica.emit
            self._saver = Saver(*whole, self._checkpoints, state, self.audit)
        is_after_loss = memory.kept is not None and bool(self._order.generations[-1].left)
        record = synchronizer.record
        self._keeper = EpochKeeper(self, replica, state, record, sync, self._saver, is_after_loss)
        return [stateful[training_state.HISTORY], self._keeper]

    def keep_last_step(self) -> None:
        """After a loss, store the state after the last step that this worker completed."""
        if self._keeper is not None:
            self._keeper.keep_last_step()

    def close(self, replica: Replica) -> Callable[[], None] | None:
        if self._checkpoints is None or not self.job.discards_checkpoints:
            # A worker that has left cannot take the place of rank 0.
            wait_for_all(replica)
        return super().close(replica)

    def _open_checkpoints(self, replica: Replica, options: Checkpoint) -> None:
        """Open the checkpoints; the first group resumes from the newest one, if there is one."""
        memory, order = self.memory, self._order
        manifest, write = describe_replica(replica)
        memory.rate = memory.rate or describe_rate(replica.model)  # callbacks may change it
        # Rank 0's, which a late writer has, too.
        own_run = (memory.run or new_run()).encode()
        memory.run = broadcast_bytes(replica.collective, own_run).decode()
        if order.epoch is None:
            own = self.job, replica.collective, manifest, write, replica.emit
            self._checkpoints = open_checkpoints(*own, order.generations, memory.run)
            self.start = start = self._checkpoints.start
            self.groups = find_groups_before(start.generations, start.epoch, start.step)
            memory.is_own = False
            self.audit = memory.audit = start.audit or memory.audit
        elif manifest is None:
            self._checkpoints = Checkpoints(options, self.start)
        else:
            described = {**manifest.job, "learning_rate": memory.rate}
            manifest = replace(manifest, generations=order.generations, job=described)
            self._checkpoints = continue_checkpoints(
                options, manifest, write, replica.emit, self.start, memory.checkpoints, memory.run
            )
        memory.checkpoints = self._checkpoints if replica.rank == 0 else None

    def _go_back(self, collective: Collective) -> training_state.TrainingStart:
        """Return where to resume; rank 0 sends the state to workers that do not have it."""
        memory, epoch, groups = self.memory, self._order.epoch, self.groups
        if epoch is None:
            memory.kept = memory.next = None
            return self.start
        known = (memory.kept, memory.next)
        saved = next((s for s in known if s and s.position == (epoch, groups)), None)
        if not np.all(collective.all_gather(np.array([saved is not None], np.int64))):
            received = broadcast_bytes(collective, saved.state if saved else b"")
            saved = saved or EpochState(epoch, received, groups, is_own=False)
        assert saved is not None
        memory.kept, memory.next, memory.is_own = saved, None, saved.is_own
        state = decode_state(saved.state)
        step = sum(steps for _, steps in groups)
        return training_state.TrainingStart(epoch, step, state["is_stopped"], state)


def _report_files(replica: Replica) -> None:
    """Report callbacks of rank 0 alone that count steps."""
    others = select_callbacks(1, replica.callbacks)
    own = (one for one in replica.callbacks if one not in others)
    if names := [type(one).__name__ for one in own if counts_steps(one)]:
        replica.emit(Note(_ABOUT_FILES.format(", ".join(names))))


class EpochKeeper(keras.callbacks.Callback):
    """Last of the callbacks: stores each epoch's initial state, and lets workers leave and join.

    An epoch is complete once every worker has stored the state at the start of the next one. A
    worker that completes the next exchange knows that all workers have stored theirs.

    Within an epoch, the variables themselves are the state after the last step, with the values in
    the record. The end of an epoch changes them, so a copy is made before the last step.
    """

    def __init__(
        self,
        lifecycle: ElasticLifecycle,
        replica: Replica,
        state: training_state.TrainingState,
        record: StepRecord | None,
        sync: training_state.StatefulSync,
        saver: Saver | None,
        is_after_loss: bool,
    ) -> None:
        super().__init__()
        self._replica, self._collective = replica, replica.collective
        self._job, self._batches = replica.job, replica.batches
        self._preemption = lifecycle.preemption
        self._preempted: tuple[int, ...] = ()
        self._memory, self._start = lifecycle.memory, lifecycle.start
        self._epoch, self._groups = lifecycle.start.epoch, lifecycle.groups
        self._state, self._record, self._sync, self._saver = state, record, sync, saver
        # An interval that began again with each loss might never end.
        is_timed = saver is not None and not saver.schedule.is_each_epoch
        self._is_after_loss, self._is_due = is_after_loss, is_after_loss and is_timed
        self._before_last: tuple[StepValues, dict[str, Any]] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self._start.state is None:
            self._keep(self._job.initial_epoch)
        elif not self._start.is_within_epoch:
            self._restore()
            is_over = self._start.epoch == self._job.epochs
            if self._saver is not None and self._is_after_loss and is_over:
                # The lost worker may not have written the last checkpoint.
                self._save(self._start.epoch, 0, self._start.is_stopped)
        if lost := self._state.find_lost():
            text = (
                "continuing after a loss does not restore these attributes of callbacks, which are "
                f"not plain data: {', '.join(lost)}. They keep their values from the interruption"
            )
            self._replica.emit(Note(text))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._start.is_within_epoch and epoch == self._start.epoch:
            self._restore()
            if self._collective.rank and self._record is not None:
                self._record.empty_metrics()
            self._sync.begin_part()
            self.model.stop_training = self._start.is_stopped
        elif epoch != self._epoch:
            self._groups = ()
            if self._saver is not None:
                self._saver.schedule.begin_epoch()
        self._epoch, self._before_last = epoch, None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        is_last = batch == self._batches.steps - 1
        if is_last and self._record is not None and self._record.last is not None:
            self._before_last = self._record.last, self._state.read_alone()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._saver is None:
            return
        done, record = min(batch + 1, self._batches.steps), self._record
        self._is_due |= self._saver.schedule.count(done) | self._is_newly_preempted()
        # A checkpoint at the end of the epoch replaces this one.
        if not self._is_due or done == self._batches.steps or self.model.stop_training:
            return
        if record is not None and (record.last is not None or self._collective.world_size == 1):
            with record.combined():
                self._save(self._epoch, done, self._state.is_stopped)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        is_stopped = bool(self.model.stop_training)
        # No epoch follows one that has stopped the training.
        following = self._job.epochs if is_stopped else epoch + 1
        is_preempted, is_change = self._keep(following)
        if self._record is not None:
            self._record.begin_epoch()
        is_over = following == self._job.epochs
        is_left = is_change and not is_over
        # All may be preempted at the same time.
        if self._saver is not None and (
            self._saver.schedule.is_due_at_end() or self._is_due or is_over or is_left
        ):
            self._save(epoch + 1, 0, is_stopped)
        if is_left and is_preempted:
            if self._memory.checkpoints is not None:
                self._memory.checkpoints.wait(self._job.timeout)
            raise LeftError(epoch + 1)
        if is_left:
            raise GroupChangesError

    def _is_newly_preempted(self) -> bool:
        """Return whether another worker was preempted; the same on all ranks."""
        before = self._preempted
        if self._preemption is not None:
            self._preempted = self._preemption.find_preempted(is_epoch_end=False)
        return self._preempted != before

    def _save(self, epoch: int, step: int, is_stopped: bool) -> None:
        assert self._saver is not None
        self._saver.save(epoch, step, is_stopped)
        self._is_due = False

    def keep_last_step(self) -> None:
        """Store the state after the last step that this worker completed in this epoch."""
        record = self._record
        if record is None or record.last is None or not record.is_settled:
            return
        last = record.last
        before: dict[str, Any] = {}
        if record.has_ended or last.step == self._batches.steps:
            if self._before_last is None:
                return
            last, before = self._before_last
            self._state.write(before.pop("variables"))
        record.restore(last)
        state = {**self._state.read_alone(), **before}
        taken = last.step - sum(steps for _, steps in self._groups)
        groups = (*self._groups, (self._collective.world_size, taken))
        self._memory.kept = EpochState(self._epoch, encode_state(state), groups)

    def _restore(self) -> None:
        state = self._start.state
        group = self._collective.rank, self._collective.world_size
        self._state.restore(state, *((0, 1) if self._memory.is_own else group))
        state.clear()  # it may be large, and others refer to it
        if not self._memory.is_own:
            # From here on, this worker may return to the state with its own random numbers.
            own = encode_state({**self._state.read_alone(), "is_stopped": self._start.is_stopped})
            self._memory.kept = EpochState(self._start.epoch, own, self._groups)

    def _keep(self, epoch: int) -> tuple[bool, bool]:
        """Return whether this worker was preempted, and whether any was or a new one is joining."""
        memory = self._memory
        memory.next = EpochState(epoch, self._state.read(self._collective))
        is_preempted = memory.notice()
        requests = np.array([is_preempted, memory.is_asked()], np.int64)
        is_change = bool(np.any(self._collective.all_gather(requests)))
        memory.kept, memory.next = memory.next, None
        return is_preempted, is_change


@dataclass(frozen=True)
class Membership:
    """Data and functions that a worker needs to join a generation.

    ``member`` is its unique number, and ``host`` the address at which the others reach this
    machine. In the first generation, it accepts their connections on ``server``, a listening
    socket. ``wait`` returns the `Order` to join a generation, and ``is_asked`` whether another
    worker has been waiting to join since. ``join`` connects to the other workers, all of which are
    ready, given the job of this generation, the rank, the `Order` and a listening socket.
    ``answers`` are messages from observers of the training run to this worker.
    """

    member: int
    host: str
    server: socket.socket
    wait: Callable[[], Order]
    is_asked: Callable[[], bool]
    join: Callable[[TrainingJob, int, Order, socket.socket], AbstractContextManager[Collective]]
    answers: Answers


def train_in_generations(
    job: TrainingJob, membership: Membership, folder: Path, emit: Emit
) -> Training:
    """Train in one generation after another, until training is complete.

    The folder has the rows of all workers.
    """
    memory = Memory(membership.member, load_job_model(job, folder), membership.is_asked)
    rows = read_all_sources(job, folder)
    reason, server = "", membership.server
    for number in itertools.count():
        epoch, groups = memory.kept.position if memory.kept else (None, ())
        emit(Standby(address_of(server), number, epoch, groups, reason))
        order = membership.wait()
        workers, rank = len(order.peers), order.rank
        assert rank is not None
        rows |= {name: total for name, (total,) in order.counts.items()}
        counts = {name: count_sharded(total, workers) for name, total in rows.items()}
        own = replace(job, workers=workers)
        lifecycle = ElasticLifecycle(own, memory, order)
        if rank and memory.checkpoints is not None:  # another worker continues them
            memory.checkpoints.wait(job.timeout)
            memory.checkpoints = None
        try:
            with membership.join(own, rank, order, server) as collective:
                return train(
                    own,
                    collective,
                    counts,
                    folder,
                    emit,
                    lifecycle=lifecycle,
                    loaded=memory.loaded,
                    answers=membership.answers,
                )
        except (PeerLostError, GroupChangesError) as error:
            reason = str(error)
            if isinstance(error, PeerLostError):
                lifecycle.keep_last_step()
        server = listen(membership.host)
    raise AssertionError
