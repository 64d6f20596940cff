"""One worker's part in an elastic training: one generation after another, in the same process."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from pybackend.collective import Collective
from pybackend.data.reading import read_all_sources
from pybackend.data.sharding import count_dealt
from pybackend.engine.elastic import ElasticLifecycle, GangChangesError, Memory
from pybackend.engine.train import Training, train
from pybackend.errors import PeerLostError
from pybackend.job.answers import Answers
from pybackend.job.job import TrainingJob
from pybackend.job.messages import Emit, Order, Standby
from pybackend.model.load import load_job_model
from pybackend.net.rendezvous import address_of, listen


@dataclass(frozen=True)
class Membership:
    """Data and functions that a worker needs to join a generation.

    Attributes
    ----------
    member
        Its unique number.
    host
        Address of this machine at which the others reach it.
    server
        Listening socket at which it accepts the other workers of the first generation.
    wait
        Waits for the order to join a generation.
    is_asked
        Returns whether another worker waits to join since that order.
    join
        Connects to the other workers, all of which are ready: called with the job of this
        generation, the rank, the order, and a listening socket.
    answers
        Messages from observers of the training to this worker.
    """

    member: int
    host: str
    server: socket.socket
    wait: Callable[[], Order]
    is_asked: Callable[[], bool]
    join: Callable[[TrainingJob, int, Order, socket.socket], AbstractContextManager[Collective]]
    answers: Answers


def train_in_gangs(job: TrainingJob, membership: Membership, folder: Path, emit: Emit) -> Training:
    """Train in one generation after another, until the training is complete.

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
        counts = {name: count_dealt(total, workers) for name, total in rows.items()}
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
        except (PeerLostError, GangChangesError) as error:
            reason = str(error)
        server = listen(membership.host)
    raise AssertionError
