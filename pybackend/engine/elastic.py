"""Elastic training: one generation of workers after another."""

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

from pybackend.collective import Collective, broadcast_bytes
from pybackend.data.reading import read_all_sources
from pybackend.data.sharding import count_sharded
from pybackend.data.state_file import decode_state
from pybackend.engine.lifecycle import (
    Lifecycle,
    Start,
    build_what_is_restored,
    share_first_weights,
    wait_for_all,
)
from pybackend.engine.replica import Replica
from pybackend.engine.state import offset_seeds
from pybackend.engine.steps import has_keras_train_step
from pybackend.engine.sync import EpochSync
from pybackend.engine.synchronizer import Synchronizer
from pybackend.engine.train import Training, train
from pybackend.engine.training_state import HISTORY, TrainingState, keep_callbacks
from pybackend.errors import PeerLostError
from pybackend.job.job import TrainingJob
from pybackend.job.messages import Answers, Emit, Note, Order, Standby
from pybackend.job.notice import LeftError, Notice
from pybackend.job.report import Audit
from pybackend.model.load import LoadedModel, load_job_model
from pybackend.net.rendezvous import address_of, listen


class GroupChangesError(Exception):
    """End of an epoch after which the workers form a new generation."""


@dataclass(frozen=True)
class EpochState:
    """State at the beginning of an epoch, as returned by `TrainingState.read`."""

    epoch: int
    state: bytes = field(repr=False)


@dataclass
class Memory:
    """State of a worker that lasts from one generation to the next.

    Attributes
    ----------
    member
        The worker's unique number; its rank when it was started.
    loaded
        The model and the callbacks.
    is_asked
        Returns whether another worker is waiting to join.
    notice
        Returns whether this process was preempted.
    first
        Attributes of callbacks before training, as in `TrainingState`.
    kept
        The beginning of the current epoch, once every worker has stored it.
    next
        The beginning of an epoch that some workers may not have stored yet.
    is_seeded
        True if this process already has its own random numbers.
    is_own
        True if this process had the state that the generation began with.
    audit
        Results of the audits of all generations that this process belonged to.
    """

    member: int
    loaded: LoadedModel
    is_asked: Callable[[], bool]
    notice: Notice = field(default_factory=Notice)
    first: dict[int, dict[str, str]] = field(default_factory=dict)
    kept: EpochState | None = None
    next: EpochState | None = None
    is_seeded: bool = False
    is_own: bool = False
    audit: Audit = field(default_factory=Audit)


class ElasticLifecycle(Lifecycle):
    """One worker group's part of elastic training.

    Parameters
    ----------
    memory
        The memory of this worker, from all groups that it belonged to.
    epoch
        Epoch to whose beginning training returns; None at the start of training.
    """

    def __init__(self, job: TrainingJob, memory: Memory, epoch: int | None) -> None:
        super().__init__(job)
        self._memory = memory
        self._epoch = epoch
        self.audit = memory.audit

    def load_model(self, folder: Path) -> LoadedModel:
        """Return the model and the callbacks, in the state after the last group."""
        return self._memory.loaded

    def seed(self, rank: int) -> None:
        """Seed random numbers once in this process, by the unique number of the worker."""
        if not self._memory.is_seeded:
            super().seed(self._memory.member)

    def begin(self, replica: Replica) -> None:
        """Return to the beginning of the epoch, and prepare the replica for it."""
        self.start = self._go_back(replica.collective)
        if self.start.state is not None:
            replica.feed.resume(self.job.initial_epoch)
        if has_keras_train_step(replica.model):
            build_what_is_restored(replica)
        self._memory.notice.expect()

    def share_state(self, replica: Replica) -> None:
        """Send rank 0's weights to all ranks; a group that repeats an epoch restores them later."""
        if not self._memory.is_seeded:
            offset_seeds(replica.model, self._memory.member)
            self._memory.is_seeded = True
        if replica.collective.world_size > 1 and self.start.state is None:
            share_first_weights(replica)

    def make_callbacks(
        self, replica: Replica, sync: EpochSync, synchronizer: Synchronizer
    ) -> list[Any]:
        """Return the callbacks that store each epoch's beginning and restore it."""
        memory, stateful = self._memory, keep_callbacks(replica)
        state = TrainingState(replica.model, sync, synchronizer, stateful, memory.first)
        return [stateful[HISTORY], EpochKeeper(replica, memory, self.start, state)]

    def close(self, replica: Replica) -> None:
        """Wait until rank 0 has written the model."""
        wait_for_all(replica)

    def _go_back(self, collective: Collective) -> Start:
        """Return where to resume; rank 0 sends the state to workers that do not have it."""
        memory, epoch = self._memory, self._epoch
        if epoch is None:
            memory.kept = memory.next = None
            return self.start
        saved = next((s for s in (memory.kept, memory.next) if s and s.epoch == epoch), None)
        memory.is_own = saved is not None
        if not np.all(collective.all_gather(np.array([memory.is_own], np.int64))):
            received = broadcast_bytes(collective, saved.state if saved else b"")
            saved = saved or EpochState(epoch, received)
        assert saved is not None
        memory.kept, memory.next = saved, None
        state = decode_state(saved.state)
        return Start(epoch, is_stopped=state["is_stopped"], state=state)


class EpochKeeper(keras.callbacks.Callback):
    """Last of the callbacks: stores each epoch's initial state, and lets workers leave and join.

    An epoch is complete once every worker has stored the state at the start of the next one. A
    worker that completes the next exchange knows that all workers have stored theirs.
    """

    def __init__(
        self, replica: Replica, memory: Memory, start: Start, state: TrainingState
    ) -> None:
        super().__init__()
        self._job = replica.job
        self._collective = replica.collective
        self._memory = memory
        self._start = start
        self._state = state
        self._emit = replica.emit

    def on_train_begin(self, logs: Any = None) -> None:
        if self._start.state is None:
            self._keep(self._job.initial_epoch)
        else:
            own = (0, 1) if self._memory.is_own else self._place
            self._state.restore(self._start.state, *own)
            self._start.state.clear()  # it may be large, and others refer to it
        if lost := self._state.find_lost():
            text = (
                "repeating an epoch does not restore these attributes of callbacks, which are not "
                f"plain data: {', '.join(lost)}. They keep their values from the interruption"
            )
            self._emit(Note(text))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # No epoch follows one that has stopped the training.
        following = self._job.epochs if self.model.stop_training else epoch + 1
        is_preempted, is_change = self._keep(following)
        if following == self._job.epochs or not is_change:
            return
        if is_preempted:
            raise LeftError(epoch + 1)
        raise GroupChangesError

    @property
    def _place(self) -> tuple[int, int]:
        return self._collective.rank, self._collective.world_size

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

    Attributes
    ----------
    member
        Its unique number.
    host
        Address at which the others can reach this machine.
    server
        Listening socket on which it accepts connections from the others in the first generation.
    wait
        Waits for the `Order` to join a generation.
    is_asked
        Returns whether another worker has been waiting to join since that `Order`.
    join
        Connects to the other workers, all of which are ready: called with the job of this
        generation, the rank, the `Order`, and a listening socket.
    answers
        Messages from observers of the training run to this worker.
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

    Parameters
    ----------
    folder, emit
        As in `train`; the folder has the rows of all workers.
    """
    memory = Memory(membership.member, load_job_model(job, folder), membership.is_asked)
    rows = read_all_sources(job, folder)
    reason, server = "", membership.server
    for number in itertools.count():
        stored = memory.kept.epoch if memory.kept else None
        emit(Standby(address_of(server), number, stored, reason))
        order = membership.wait()
        workers, rank = len(order.peers), order.rank
        assert rank is not None
        rows |= {name: total for name, (total,) in order.counts.items()}
        counts = {name: count_sharded(total, workers) for name, total in rows.items()}
        own = replace(job, workers=workers)
        try:
            with membership.join(own, rank, order, server) as collective:
                return train(
                    own,
                    collective,
                    counts,
                    folder,
                    emit,
                    lifecycle=ElasticLifecycle(own, memory, order.epoch),
                    answers=membership.answers,
                )
        except (PeerLostError, GroupChangesError) as error:
            reason = str(error)
        server = listen(membership.host)
    raise AssertionError
