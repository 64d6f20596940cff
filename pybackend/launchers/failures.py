"""Failures in a job, from events, reports and cluster errors."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable

from pybackend.errors import Failure, WorkerFailedError, root_cause_first
from pybackend.job.job import Job
from pybackend.job.messages import Answer, Begun, Emit, Event, Failed, Note, answer_of
from pybackend.job.report import WorkerReport

# Time after the first failure in which other workers can report an earlier one.
GRACE_SECONDS = 5.0
# The same if the first one is a cause by itself; a worker that exited counts as lost after two.
_SHORT_GRACE_SECONDS = 3.0


def describe_silence(rank: int, host: str, seconds: float) -> Failure:
    """Return the failure of a worker whose launcher has been silent for ``seconds``."""
    return Failure(
        rank,
        host,
        exception_type="WorkerStalled",
        message=f"the process that runs the worker has shown no sign of life for {seconds:g} s: it "
        "was stopped, its container was frozen, or its host cannot be reached",
        time=time.time(),
        advice="find out what stops processes on that host (kill -STOP, docker pause, a suspended "
        "machine), and continue them within `timeout` seconds, or raise `timeout`",
    )


def find_fatal(job: Job, reports: Iterable[WorkerReport]) -> list[Failure]:
    """Return the failures that end a job; none if training continues without the lost workers."""
    failures = [report.failure for report in reports if report.failure is not None]
    lost = {failure.rank for failure in failures if failure.is_loss}
    if len(lost) == len(failures) and job.can_lose(lost):
        return []
    others = [f for f in failures if not (f.is_loss and job.can_lose({f.rank}))]
    return others if any(failure.is_loss for failure in others) else failures


def describe_loss(failure: Failure) -> Note:
    """Return the note about a lost worker when training continues without it."""
    return Note(
        f"worker {failure.rank} on {failure.host} was lost ({failure.message}): training continues "
        "without it and its rows"
    )


class Failures:
    """The failures in a job, one per rank; other events go to ``on_event``, which may answer."""

    def __init__(self, on_event: Emit) -> None:
        self._on_event = on_event
        self._by_rank: dict[int, Failure] = {}
        self._any = threading.Event()
        self._has_begun = False
        self._announced: set[int] = set()
        self._deadline = math.inf

    def __bool__(self) -> bool:
        return self._any.is_set()

    def __call__(self, event: Event) -> Answer | None:
        """Store a failure, or pass the event on; return the answer for the worker that sent it."""
        if isinstance(event, Failed):
            self.add([event.failure])
        elif isinstance(event, Begun):
            self._has_begun = True
        else:
            return answer_of(self._on_event, event)
        return None

    def find_fatal(self, job: Job, reports: Iterable[WorkerReport]) -> list[Failure]:
        """Return the failures that end a job: all of them until asynchronous training begins."""
        if self._has_begun:
            return find_fatal(job, reports)
        return [report.failure for report in reports if report.failure is not None]

    def deadline(self, job: Job, reports: Collection[WorkerReport]) -> float:
        """Return when to stop waiting for running workers; infinity while the job continues.

        The clock is ``time.monotonic``. Each loss is reported to the user once. The report of a
        loss may arrive before the report that training has begun.
        """
        if fatal := self.find_fatal(job, reports):
            is_known = not all(failure.may_be_consequence for failure in fatal)
            grace = _SHORT_GRACE_SECONDS if is_known else GRACE_SECONDS
            self._deadline = min(self._deadline, time.monotonic() + grace)
            return self._deadline
        self._deadline = math.inf
        for report in reports:
            if report.failure is not None and report.rank not in self._announced:
                self._announced.add(report.rank)
                self._on_event(describe_loss(report.failure))
        return self._deadline

    def add(self, failures: Iterable[Failure]) -> None:
        """Store failures; a later failure of the same rank replaces an earlier one."""
        for failure in failures:
            self._by_rank[failure.rank] = failure
            self._any.set()

    def wait(self, seconds: float) -> None:
        """Wait until another thread has added a failure."""
        self._any.wait(seconds)

    def raise_any(self) -> None:
        """Raise `WorkerFailedError` if any worker failed; the earliest failure is the cause."""
        if self._by_rank:
            raise WorkerFailedError(root_cause_first(list(self._by_rank.values())))
