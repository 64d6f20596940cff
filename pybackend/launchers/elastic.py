"""An elastic training: workers that are lost are done without, or replaced."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from pybackend.data.arrays import Columns, count_rows
from pybackend.errors import ClusterError, Failure, WorkerFailedError, root_cause_first
from pybackend.job.arguments import counted
from pybackend.job.job import TrainingJob
from pybackend.job.messages import (
    Emit,
    EpochEnded,
    Event,
    FromLauncher,
    Note,
    Order,
    Regroup,
    Standby,
    StepEnded,
    answer_of,
)
from pybackend.job.notice import RESTARTS
from pybackend.job.report import Gang, WorkerReport
from pybackend.launchers.base import Outcome
from pybackend.launchers.failures import GRACE_SECONDS
from pybackend.net.rendezvous import new_token

# Before a worker is started again where none could be, or where a host was lost.
_REST_SECONDS = 30.0
# Without one that has joined and trained an epoch: no more are started after that.
_MOST_LOST_IN_A_ROW = 10
_NO_STATE = "none of those that are left has the state of the training"


@dataclass(frozen=True)
class Obstacle:
    """Why the worker of this number cannot run there."""

    error: ClusterError
    rank: int


@dataclass(frozen=True)
class Remark:
    """Something of a site that the user should know."""

    text: str


Said = Event | WorkerReport | Obstacle | Remark


class Worker(Protocol):
    """A worker that was started somewhere."""

    @property
    def host(self) -> str:
        """Where, for messages."""

    def go(self, order: FromLauncher) -> None:
        """Send it an order."""

    def model(self) -> tuple[str, bytes] | None:
        """Format and content of the trained model's file, if it has reported and wrote one."""

    def close(self) -> None:
        """Leave nothing of one that has failed."""


class Site(Protocol):
    """Where workers of an elastic training run.

    Attributes
    ----------
    places
        How many places for workers there are.
    """

    places: int

    def start(self, number: int, place: int, say: Callable[[Said], None]) -> Worker:
        """Start a worker, with all rows; it stands by when it could train.

        Raises
        ------
        OSError, ClusterError
            It cannot be started; nothing of it is left.

        Parameters
        ----------
        number
            The worker's; no other ever has it.
        place
            The worker's, from 0; no two that live are in one.
        say
            Receives, from a thread, the worker's events, and at last its report or an obstacle;
            ``rank`` is the number.
        """


def train_elastically(
    job: TrainingJob, datasets: Mapping[str, Columns], on_event: Emit, site: Site
) -> Outcome:
    """Run an elastic training to its end; the caller ends what the site has started.

    Parameters
    ----------
    datasets, on_event
        As in `Launcher.launch`; the site gives the workers all of these rows.

    Raises
    ------
    ClusterError
        A worker cannot run where it is to begin.
    WorkerFailedError
        Fewer than ``min_workers`` are left, or a worker failed by what it ran.
    """
    counts = {name: count_rows(columns) for name, columns in datasets.items()}
    training = _Training(job, counts, on_event, site)
    training.begin()
    while not training.is_over:
        training.advance()
    return training.conclude()


@dataclass
class _Member:
    """A worker, and what it has said last: that it stands by, or its report."""

    number: int
    place: int
    worker: Worker
    address: str = ""
    orders: int = 0
    standby: Standby | None = None
    report: WorkerReport | None = None

    @property
    def host(self) -> str:
        return self.worker.host

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


class _Training:
    def __init__(
        self, job: TrainingJob, counts: Mapping[str, int], on_event: Emit, site: Site
    ) -> None:
        self._job = job
        self._counts = counts
        self._on_event = on_event
        self._site = site
        self._said: queue.Queue[Said] = queue.Queue()
        self._members: list[_Member] = []
        self._gang: list[_Member] = []
        self._gangs: list[Gang] = []
        self._epoch: int | None = None
        self._lost_in_a_row = 0
        self._has_asked = False
        self._notes: set[str] = set()
        self._deadline: float | None = None
        self._lost: dict[int, float] = {}  # when a worker of a place was, by the place
        self._rests: dict[int, float] = {}

    def begin(self) -> None:
        """Start the first workers; they train together when all that are left stand by."""
        for place in range(self._job.workers):
            self._start(place)
        self._gang = list(self._members)

    @property
    def is_over(self) -> bool:
        """Whether the model is there: then no other worker is needed any more."""
        return self._gang[0].is_done and not any(member.is_busy for member in self._gang)

    @property
    def _is_trained(self) -> bool:
        return any(member.is_done for member in self._gang)

    def advance(self) -> None:
        """Take what a worker has said, if one says something soon, and do what follows from it."""
        with suppress(queue.Empty):
            # A short wait, so that Ctrl-C is noticed by Python's main thread, and by R.
            self._take(self._said.get(timeout=0.1))
        self._give_up_if_failed()
        if not any(member.is_busy for member in self._gang):
            if not self.is_over:
                self._regroup()
        elif self._gangs:
            self._fill()
            self._invite()

    def conclude(self) -> Outcome:
        """What the last gang has reported, by rank."""
        ranked = [
            replace(member.report, rank=rank)
            for rank, member in enumerate(self._gang)
            if member.report is not None and member.is_done
        ]
        return Outcome(ranked, self._gang[0].worker.model(), gangs=tuple(self._gangs))

    def _start(self, place: int) -> None:
        number = len(self._members)
        worker = self._site.start(number, place, self._said.put)
        self._members.append(_Member(number, place, worker))

    def _take(self, said: Said) -> None:
        if isinstance(said, Obstacle):
            if not self._gangs:
                raise said.error
            # Not counted: a host may be out of reach for long.
            self._end(self._describe(said.rank, "HostLost", str(said.error)), 0)
        elif isinstance(said, WorkerReport):
            if said.failure is None:
                self._members[said.rank].report = said
            else:
                self._end(said.failure)
        elif isinstance(said, Remark):
            self._note(said.text)
        elif isinstance(said, Standby):
            member = self._members[said.rank]
            if said.orders == member.orders:  # else it has had another order meanwhile
                member.standby, member.address = said, said.address
        else:
            self._pass_on(said)

    def _end(self, failure: Failure, losses: int = 1) -> None:
        """Note a worker's failure; one that has not joined yet harms nobody."""
        member = self._members[failure.rank]
        member.report = WorkerReport(member.number, member.host, 0, failure=failure)
        member.worker.close()
        self._lost_in_a_row += losses
        if self._lost_in_a_row == _MOST_LOST_IN_A_ROW + 1 and self._job.max_workers is not None:
            self._note(f"{self._lost_in_a_row} workers were lost in a row: no others are started")
        now = self._lost[member.place] = time.monotonic()
        if self._gangs and not member.orders:
            self._rests[member.place] = now + _REST_SECONDS
            text = f"no worker could join on {member.host}: {failure.message}"
            self._note(f"{text}. Another one is started there every {_REST_SECONDS:.0f} s")
        elif failure.exception_type == "HostLost":
            self._rests[member.place] = now + _REST_SECONDS

    def _fill(self) -> None:
        """Start workers in free places while there may be more."""
        if self._is_trained or self._lost_in_a_row > _MOST_LOST_IN_A_ROW:
            return
        alive = [member for member in self._members if member.report is None]
        taken, now = {member.place for member in alive}, time.monotonic()
        free = [
            place
            for place in range(self._site.places)
            if place not in taken and self._rests.get(place, 0.0) <= now
        ]
        # Where one was told to end, the whole machine may be about to go.
        free.sort(key=lambda place: self._lost.get(place, 0.0))
        for place in free[: max(0, (self._job.max_workers or 0) - len(alive))]:
            try:
                self._start(place)
            except (OSError, ClusterError) as error:  # a full disk, too many processes
                self._rests[place] = now + _REST_SECONDS
                self._note(f"another worker could not be started: {error}")

    def _invite(self) -> None:
        """Have the gang stand by at the end of its epoch if another worker could join it.

        If its first worker is lost, or stands by, the others will do so anyway.
        """
        if self._find_joining() and self._gang[0].is_busy and not self._has_asked:
            self._has_asked = True
            self._gang[0].worker.go(Regroup())

    def _find_joining(self) -> list[_Member]:
        return [m for m in self._members if m.is_ready and m not in self._gang]

    def _regroup(self) -> None:
        """Make a new gang of those that stand by: nobody trains any more."""
        staying = [member for member in self._gang if member.is_ready]
        lost = [member for member in self._gang if member.failure is not None]
        epochs = [m.standby.epoch for m in staying if m.standby and m.standby.epoch is not None]
        epoch = max(epochs, default=None)
        is_trained = self._is_trained or epoch == self._job.epochs
        joining = [] if is_trained else self._find_joining()
        reasons = {m.number: m.standby.reason for m in staying if m.standby and m.standby.reason}
        if reasons and not lost:
            self._fail([self._describe(n, "PeerLostError", text) for n, text in reasons.items()])
        least = 1 if is_trained else self._job.min_workers or 1
        if not staying or len(staying) + len(joining) < least:
            why = f"fewer than min_workers={self._job.min_workers} are left"
            self._fail([self._explain(m.failure, why) for m in lost if m.failure])
        if epoch is None and self._epoch is not None:
            self._fail([self._explain(m.failure, _NO_STATE) for m in lost if m.failure])
        # First one that surely has the state of that epoch's beginning.
        staying.sort(key=lambda m: m.standby is None or m.standby.epoch != epoch)
        self._form([*staying, *joining], epoch, {m.number: m.failure for m in lost if m.failure})

    def _form(
        self, members: Sequence[_Member], epoch: int | None, lost: Mapping[int, Failure]
    ) -> None:
        """Order workers to train together, by rank, from the beginning of an epoch on."""
        before = {member.number for member in self._gang}
        self._gang, self._epoch, self._has_asked = list(members), epoch, False
        first = (self._job.initial_epoch if epoch is None else epoch) + 1
        numbers = [member.number for member in members]
        joined = [n for n in numbers if n not in before] if self._gangs else []
        left = {str(number): failure.message for number, failure in lost.items()}
        self._gangs.append(Gang(first, numbers, joined, left))
        self._tell(self._gangs[-1], lost)
        token, peers = new_token(), tuple(member.address for member in members)
        counts = {name: [rows] for name, rows in self._counts.items()}
        for rank, member in enumerate(members):
            member.orders, member.standby = member.orders + 1, None
            member.worker.go(Order(token, peers, counts=counts, rank=rank, epoch=epoch))

    def _tell(self, gang: Gang, lost: Mapping[int, Failure]) -> None:
        """Say who has gone and come, and why."""
        said = [f"worker {n} on {f.host} is gone ({f.message})" for n, f in lost.items()]
        said += [f"worker {n} on {self._members[n].host} joins" for n in gang.joined]
        count = len(gang.workers)
        if said and gang.epoch <= self._job.epochs:
            said.append(f"epoch {gang.epoch} is trained by {counted(count, 'worker')}")
        if said:
            self._on_event(Note("; ".join(said)))

    def _pass_on(self, event: Event) -> None:
        """What all ranks say alike is heard from rank 0, whoever that is, and once."""
        if not isinstance(event, (EpochEnded, StepEnded, Note)):
            self._on_event(event)
        elif self._members[event.rank] is not self._gang[0]:
            pass
        elif isinstance(event, Note):
            self._note(event.text)
        else:
            if isinstance(event, EpochEnded) and self._members[-1] in self._gang:
                self._lost_in_a_row = 0
            if answer := answer_of(self._on_event, replace(event, rank=0)):
                self._gang[0].worker.go(answer)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._on_event(Note(text))

    def _give_up_if_failed(self) -> None:
        """Raise what a worker has failed by, unless it was lost; the others get a short grace."""
        had = [member for member in self._members if member.orders or not self._gangs]
        failures = [member.failure for member in had if member.failure is not None]
        causes = [f for f in failures if not (f.is_loss or f.is_end_of_job)]
        if not causes:
            return
        self._deadline = self._deadline or time.monotonic() + GRACE_SECONDS
        if time.monotonic() > self._deadline or not any(m.is_busy for m in self._gang):
            self._fail(causes)

    def _fail(self, failures: Sequence[Failure]) -> NoReturn:
        raise WorkerFailedError(root_cause_first(failures))

    def _explain(self, failure: Failure, why: str) -> Failure:
        """The failure of a worker that was one too many to be lost."""
        message = f"{failure.message}; {why}"
        known = f"{failure.advice}; " if failure.advice and failure.advice != RESTARTS else ""
        return replace(failure, message=message, advice=f"{known}{RESTARTS}")

    def _describe(self, number: int, kind: str, message: str) -> Failure:
        host = self._members[number].host
        return Failure(number, host, kind, message, time=time.time())
