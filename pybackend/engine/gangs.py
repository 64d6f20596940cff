"""A worker's part in an elastic training: one gang after another, in the same process."""

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
    """How a worker becomes a member of a gang.

    Attributes
    ----------
    member
        Its number, which no other ever has.
    host
        Address of this machine at which the others reach it.
    server
        Listening socket at which it accepts the first others.
    wait
        Waits for the order to join a gang.
    is_asked
        Whether, since that order, another worker waits to join.
    join
        The connections to the other members, all of which are ready: called with the job as it is
        for this gang, the rank, the order, and a listening socket.
    answers
        What observers of the training say to this worker.
    """

    member: int
    host: str
    server: socket.socket
    wait: Callable[[], Order]
    is_asked: Callable[[], bool]
    join: Callable[[TrainingJob, int, Order, socket.socket], AbstractContextManager[Collective]]
    answers: Answers


def train_in_gangs(job: TrainingJob, membership: Membership, folder: Path, emit: Emit) -> Training:
    """Train in one gang after another, until one has come to the end.

    Parameters
    ----------
    folder, emit
        As in `train`; the folder has the rows of all workers.
    """
    memory = Memory(membership.member, load_job_model(job, folder), membership.is_asked)
    rows = read_all_sources(job, folder)
    reason, server = "", membership.server
    for number in itertools.count():
        kept = memory.kept.epoch if memory.kept else None
        emit(Standby(address_of(server), number, kept, reason))
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
