"""Elastic training: it continues without lost workers, or replaces them."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from pybackend.core.data.arrays import Columns, count_rows
from pybackend.core.errors import (
    ClusterError,
    Failure,
    InputError,
    WorkerFailedError,
    root_cause_first,
)
from pybackend.core.job import messages
from pybackend.core.job.arguments import counted
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Emit, Event, Standby
from pybackend.core.job.notice import RESTARTS
from pybackend.core.job.report import Generation, WorkerReport
from pybackend.core.job.worker_options import Elastic
from pybackend.core.launchers.base import Outcome
from pybackend.core.launchers.crew import Crew, lost_at, take_all
from pybackend.core.net.authentication import new_token
from pybackend.core.words import setting

# First pause before a worker is started again in a slot whose start failed, or whose host was lost,
# and how many times it doubles.
_REST_SECONDS = 30.0
_MOST_DOUBLED = 5
# Losses in a row, without a new worker that trained an epoch: then no more are started.
_MOST_LOST_IN_A_ROW = 10
_NO_STATE = "none of the remaining workers has the state of the training"


@dataclass(frozen=True)
class Obstacle:
    """Error that prevents the worker whose number is ``rank`` from running in its slot."""

    error: ClusterError | InputError
    rank: int


@dataclass(frozen=True)
class Remark:
    """Message from a site to the user."""

    text: str


Said = Event | WorkerReport | Obstacle | Remark
Progress = tuple[int, tuple[tuple[int, int], ...]]


class Worker(Protocol):
    """A worker that a site has started."""

    @property
    def host(self) -> str:
        """Name of its host, for messages."""

    def go(self, order: messages.FromLauncher) -> None: ...

    def model(self) -> tuple[str, bytes] | None:
        """Return the format and content of the trained model's file, or None if there is none."""

    def close(self) -> None:
        """Clean up after a worker that failed."""


class Site(Protocol):
    """Slots in which the workers of an elastic training run are started: as many as ``places``."""

    places: int

    def start(self, number: int, place: int, say: Callable[[Said], None]) -> Worker:
        """Start a worker with all rows; it sends `Standby` when it is ready to train.

        ``number`` is never used again. ``place`` is its slot, from 0, with at most one live worker.
        ``say`` gets, in a thread, the worker's events, then its report or an obstacle; their
        ``rank`` is the worker's number. `OSError` or `ClusterError` if it cannot be started; then
        it was cleaned up.
        """


def train_elastically(
    job: TrainingJob, datasets: Mapping[str, Columns], on_event: Emit, site: Site
) -> Outcome:
    """Run elastic training to completion; the caller stops the workers of the site.

    The site gives every worker all rows of ``datasets``. `ClusterError` if one of the first workers
    cannot run in its slot. `WorkerFailedError` if fewer than ``min`` workers are left, or a worker
    failed because of the code that it ran.
    """
    counts = {name: count_rows(columns) for name, columns in datasets.items()}
    training = _Training(job, counts, on_event, site)
    training.begin()
    training.follow(training.listen, training.advance)
    return training.outcome()


@dataclass
class _Member:
    """A worker and its last message: `Standby`, or its report."""

    number: int
    place: int
    worker: Worker
    address: str = ""
    orders: int = 0
    standby: Standby | None = None
    report: WorkerReport | None = None

    @property
    def progress(self) -> Progress | None:
        """State to which it can return, as in `Standby`: an epoch and groups; None: none."""
        if self.standby is None or self.standby.epoch is None:
            return None
        return self.standby.epoch, self.standby.groups

    @property
    def is_busy(self) -> bool:
        return self.standby is None and self.report is None

    @property
    def is_done(self) -> bool:
        return self.report is not None and self.report.ok

    @property
    def failure(self) -> Failure | None:
        return self.report.failure if self.report else None

    @property
    def is_ready(self) -> bool:
        return self.standby is not None and self.report is None


class _Training(Crew):
    """The workers of elastic training, by number: those that train, join, and have left."""

    def __init__(
        self, job: TrainingJob, counts: Mapping[str, int], on_event: Emit, site: Site
    ) -> None:
        super().__init__(job, on_event, lambda answer, _: self._group[0].worker.go(answer))
        self._training, self._limits = job, job.elastic or Elastic()
        self._counts = counts
        self._site = site
        self._said: queue.Queue[Said] = queue.Queue()
        self._members: list[_Member] = []
        self._group: list[_Member] = []
        self._past: tuple[Generation, ...] = ()  # before the checkpoint that it resumed from
        self._generations: list[Generation] = []
        self._epoch: int | None = None
        self._lost_in_a_row = 0
        self._has_asked = False
        self._notes: set[str] = set()
        self._lost: dict[int, float] = {}  # time of the last loss, by slot
        self._rests: dict[int, float] = {}
        self._rested: Counter[int] = Counter()

    def begin(self) -> None:
        """Start the first workers; training begins when all that did not fail are standing by."""
        for place in range(self._training.workers):
            self._start(place)
        self._group = list(self._members)

    @property
    def missing(self) -> list[int]:
        """Workers that are training, or preparing to."""
        return [member.number for member in self._group if member.is_busy]

    @property
    def _is_trained(self) -> bool:
        return any(member.is_done for member in self._group)

    def find_fatal(self) -> list[Failure]:
        """Return the failures that end the training: those of workers in it, except losses."""
        had = [member for member in self._members if member.orders or not self._generations]
        failures = [member.failure for member in had if member.failure is not None]
        return [f for f in failures if not (f.is_loss or f.is_end_of_job)]

    def announce_losses(self) -> None:
        """Do nothing: `_tell` reports them with the generation that continues."""

    def listen(self, seconds: float) -> None:
        take_all(self._said, self.hear, seconds)

    def advance(self) -> None:
        """Form the next generation when no worker is training; else have others join."""
        if self.find_fatal():  # no worker could join any more
            return
        if not self.missing:
            if not self._group[0].is_done:
                self._regroup()
        elif self._generations:
            self._fill()
            self._invite()

    def outcome(self) -> Outcome:
        """Return the reports of the last generation, by rank; raise failures."""
        self.raise_any()
        ranked = [
            replace(member.report, rank=rank)
            for rank, member in enumerate(self._group)
            if member.report is not None and member.is_done
        ]
        generations = (*self._past, *self._generations)
        return Outcome(ranked, self._group[0].worker.model(), generations=generations)

    def _start(self, place: int) -> None:
        number = len(self._members)
        worker = self._site.start(number, place, self._said.put)
        self._members.append(_Member(number, place, worker))

    def hear(self, said: Said) -> None:
        if isinstance(said, Obstacle):
            if not self._generations:
                raise said.error
            # Not counted: a host may be unreachable for long.
            self.lose([self._describe(said.rank, "HostLost", str(said.error))])
        elif isinstance(said, WorkerReport):
            if said.failure is not None:
                self._count_loss()
            super().hear(said)
        elif isinstance(said, Remark):
            self._note(said.text)
        elif isinstance(said, Standby):
            member = self._members[said.rank]
            if said.orders == member.orders:  # else it has received another order since
                member.standby, member.address = said, said.address
        else:
            self._pass_on(said)

    def _count_loss(self) -> None:
        self._lost_in_a_row += 1
        if self._lost_in_a_row == _MOST_LOST_IN_A_ROW + 1 and self._limits.max is not None:
            self._note(f"{self._lost_in_a_row} workers were lost in a row: no more will be started")

    def add(self, report: WorkerReport) -> None:
        """Add a report; the failure of a worker that never joined does not affect the training."""
        super().add(report)
        member = self._members[report.rank]
        member.report = self.reports[report.rank]
        if report.failure is None:
            return
        member.worker.close()
        now = self._lost[member.place] = time.monotonic()
        self._on_event(lost_at(report.failure))
        if member.orders:  # it trained: the next one may, too
            self._rested.pop(member.place, None)
        if self._generations and not member.orders:
            seconds = self._rest(member.place, now)
            text = f"no worker could join on {member.worker.host}: {report.failure.message}"
            self._note(f"{text}. Another one will be started there in {seconds:.0f} s")
        elif report.failure.exception_type == "HostLost":
            self._rest(member.place, now)

    def _rest(self, place: int, now: float) -> float:
        """Leave a slot empty for a time that doubles with each call; return this time."""
        # On a host without the packages, workers were started in a loop, one after the other
        # (test_in_a_slot_where_none_can_join_workers_are_started_less_and_less_often).
        seconds = _REST_SECONDS * 2.0 ** min(self._rested[place], _MOST_DOUBLED)
        self._rested[place] += 1
        self._rests[place] = now + seconds
        return seconds

    def _fill(self) -> None:
        if self._is_trained or self._lost_in_a_row > _MOST_LOST_IN_A_ROW:
            return
        alive = [member for member in self._members if member.report is None]
        taken, now = {member.place for member in alive}, time.monotonic()
        free = [
            place
            for place in range(self._site.places)
            if place not in taken and self._rests.get(place, 0.0) <= now
        ]
        # If a worker was preempted, its whole machine may be about to shut down.
        free.sort(key=lambda place: self._lost.get(place, 0.0))
        for place in free[: max(0, (self._limits.max or 0) - len(alive))]:
            try:
                self._start(place)
            except (OSError, ClusterError) as error:  # a full disk, too many processes
                self._rest(place, now)
                self._note(f"another worker could not be started: {error}")

    def _invite(self) -> None:
        """Ask the workers to stand by at the end of the epoch if another worker is ready to join.

        If rank 0 is lost or standing by, the others will stand by anyway.
        """
        if self._find_joining() and self._group[0].is_busy and not self._has_asked:
            self._has_asked = True
            self._group[0].worker.go(messages.Regroup())

    def _find_joining(self) -> list[_Member]:
        return [m for m in self._members if m.is_ready and m not in self._group]

    def _regroup(self) -> None:
        """Form a generation from the workers that are standing by, when no worker is training."""
        staying = [member for member in self._group if member.is_ready]
        lost = [member for member in self._group if member.failure is not None]
        progress = max((m.progress for m in staying if m.progress), default=None)
        epoch = None if progress is None else progress[0]
        is_trained = self._is_trained or epoch == self._training.epochs
        joining = [] if is_trained else self._find_joining()
        reasons = {m.number: m.standby.reason for m in staying if m.standby and m.standby.reason}
        if reasons and not lost:
            self._fail([self._describe(n, "PeerLostError", text) for n, text in reasons.items()])
        least = 1 if is_trained else self._limits.min
        if not staying or len(staying) + len(joining) < least:
            why = f"fewer than {setting(min=self._limits.min)} workers are left"
            self._fail([self._explain(m.failure, why) for m in lost if m.failure])
        if epoch is None and self._epoch is not None:
            self._fail([self._explain(m.failure, _NO_STATE) for m in lost if m.failure])
        # Rank 0 must be a worker that has this state, and not one that was still receiving it
        # (test_a_worker_dies_while_the_state_is_sent_to_a_new_one).
        staying.sort(key=lambda m: m.progress != progress)
        failures = {m.number: m.failure for m in lost if m.failure}
        self._form([*staying, *joining], progress, failures)

    def _form(
        self, members: Sequence[_Member], progress: Progress | None, lost: Mapping[int, Failure]
    ) -> None:
        epoch, groups = progress or (None, ())
        before = {member.number for member in self._group}
        self._group, self._epoch, self._has_asked = list(members), epoch, False
        first = (self._training.initial_epoch if epoch is None else epoch) + 1
        numbers = [member.number for member in members]
        joined = [n for n in numbers if n not in before] if self._generations else []
        left = {str(number): failure.message for number, failure in lost.items()}
        step = 1 + sum(steps for _, steps in groups)
        self._generations.append(Generation(first, numbers, joined, left, step))
        self._tell(self._generations[-1], lost)
        token, peers = new_token(), tuple(member.address for member in members)
        counts = {name: [rows] for name, rows in self._counts.items()}
        order = messages.Order(token, peers, counts=counts, epoch=epoch, groups=groups)
        # The first workers add those before the checkpoint that they find.
        past = () if epoch is None else self._past
        order = replace(order, generations=(*past, *self._generations))
        for rank, member in enumerate(members):
            member.orders, member.standby = member.orders + 1, None
            member.worker.go(replace(order, rank=rank))

    def _tell(self, generation: Generation, lost: Mapping[int, Failure]) -> None:
        said = [f"worker {n} on {f.host} was lost ({f.message})" for n, f in lost.items()]
        said += [f"worker {n} on {self._members[n].worker.host} joined" for n in generation.joined]
        count = len(generation.workers)
        if said and generation.epoch <= self._training.epochs:
            where = f"epoch {generation.epoch}"
            if generation.step > 1:
                where = f"the rest of {where}, from step {generation.step} on,"
            said.append(f"{where} is trained by {counted(count, 'worker')}")
        if said:
            self._on_event(messages.Note("; ".join(said)))

    def _pass_on(self, event: Event) -> None:
        """Forward an event, but only rank 0's if all ranks send it, and each note only once."""
        if isinstance(event, messages.Resumed):
            first = len(event.generations) - len(self._generations)
            self._past, own = event.generations[:first], event.generations[first:]
            self._generations = list(own)
        if not isinstance(event, (messages.EpochEnded, messages.StepEnded, messages.Note)):
            super().hear(event)
        elif self._members[event.rank] is not self._group[0]:
            pass
        elif isinstance(event, messages.Note):
            self._note(event.text)
        else:
            if isinstance(event, messages.EpochEnded) and self._members[-1] in self._group:
                self._lost_in_a_row = 0
            super().hear(replace(event, rank=0))

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._on_event(messages.Note(text))

    def _fail(self, failures: Sequence[Failure]) -> NoReturn:
        raise WorkerFailedError(root_cause_first(failures))

    def _explain(self, failure: Failure, why: str) -> Failure:
        """Return the failure of a lost worker without which training cannot continue."""
        message = f"{failure.message}; {why}"
        known = f"{failure.advice}; " if failure.advice and failure.advice != RESTARTS else ""
        return replace(failure, message=message, advice=f"{known}{RESTARTS}")

    def _describe(self, number: int, kind: str, message: str) -> Failure:
        host = self._members[number].worker.host
        return Failure(number, host, kind, message, time=time.time())
