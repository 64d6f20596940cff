"""The workers of one call, from their events and reports to its outcome."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from pybackend.core.errors import ClusterError, Failure, Moment, WorkerFailedError, root_cause_first
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Answer, Begun, Emit, Event, Failed, Note, answer_of
from pybackend.core.job.report import WorkerReport
from pybackend.core.launchers.base import check_stop

if TYPE_CHECKING:
    from pybackend.core.launchers.child import Child

T = TypeVar("T")
Explain = Callable[[Failure], Failure]
# Interval of a launcher's looks at its workers.
LOOK_SECONDS = 0.1
# Messages of the platform and of a worker may be in transit at the same time.
CAUSE_SECONDS = 2.0

# Time after the first failure in which other workers can report an earlier one.
_GRACE_SECONDS = 5.0
# The same if the first one is a cause by itself: users waited five seconds for each exception of
# their code (test_others_have_longer_to_report_if_the_cause_is_not_known). A worker that exited
# counts as lost after two.
_SHORT_GRACE_SECONDS = 3.0


def describe_silence(rank: int, host: str, seconds: float) -> Failure:
    # Nobody is left there to see that the worker is stopped, and the others waited for hours
    # (test_a_first_process_that_is_stopped_with_its_worker_is_named).
    return Failure(
        rank,
        host,
        exception_type="WorkerStalled",
        message=f"the process that runs the worker has shown no sign of life for {seconds:g} s: it "
        "was stopped, its container was frozen, or its host cannot be reached",
        time=time.time(),
        advice="find out what stops processes on that host (kill -STOP, docker pause, a suspended "
        "machine), and resume them within `timeout` seconds, or raise `timeout`",
    )


def find_fatal(job: Job, reports: Iterable[WorkerReport]) -> list[Failure]:
    """Return the failures that end a job; none if training continues without the lost workers."""
    failures = [report.failure for report in reports if report.failure is not None]
    lost = {failure.rank for failure in failures if failure.is_loss}
    if len(lost) == len(failures) and job.can_lose(lost):
        return []
    others = [f for f in failures if not (f.is_loss and job.can_lose({f.rank}))]
    return others if any(failure.is_loss for failure in others) else failures


def lost_at(failure: Failure) -> Moment:
    return Moment(failure.time, "lost", failure.message, failure.rank, failure.host)


def _have_cause(failures: Iterable[Failure]) -> bool:
    """Return whether one of the failures is certainly not a consequence of another."""
    return not all(failure.may_be_consequence for failure in failures)


class Crew:
    """The workers of one call: what is known of them, which failure counts, and when to stop.

    A launcher starts the workers and passes on what it hears of them. Everything that launchers
    have in common is here: the first cause, the time that others have to report an earlier one,
    losses that a training survives, and the answers of observers. Workers that join and leave
    (`pybackend.core.launchers.elastic_workers`) count by their number instead of their rank.

    Without a ``job``, any failure ends it. ``answer`` sends a worker the session's answer to its
    event. ``hosts``, for messages, is the host of all workers, or of each rank. ``ends_together``
    means that the cluster itself ends all workers when one fails, even if training could continue.
    ``grace`` is the time in seconds after the first failure in which the others may report, or end;
    None: as long as an earlier failure may take.

    ``reports`` is what is known of the end of each worker, by rank. At ``latest``, a time of
    `time.monotonic`, `follow` stops waiting in any case.
    """

    def __init__(
        self,
        job: Job | None,
        on_event: Emit,
        answer: Callable[[Answer, int], object] = lambda answer, rank: None,
        hosts: str | Sequence[str] = "its host",
        *,
        ends_together: bool = False,
        grace: float | None = None,
    ) -> None:
        self._job, self._on_event, self._answer = job, on_event, answer
        self._hosts, self._ends_together, self._grace = hosts, ends_together, grace
        self.latest = math.inf
        self.reports: dict[int, WorkerReport] = {}
        self.has_failed = False
        self._has_begun = False
        self._announced: set[int] = set()
        self._deadline = math.inf

    @property
    def missing(self) -> list[int]:
        """Ranks of which nothing is known yet."""
        count = 0 if isinstance(self._hosts, str) else len(self._hosts)
        workers = self._job.workers if self._job else count
        return [rank for rank in range(workers) if rank not in self.reports]

    def hear(self, said: Event | WorkerReport) -> None:
        """Handle a worker's event or report; callable on any thread."""
        if isinstance(said, WorkerReport):
            self.add(said)
        elif isinstance(said, Failed):
            self.lose([said.failure])
        elif isinstance(said, Begun):
            self._has_begun = True
        elif answer := answer_of(self._on_event, said):
            self._answer(answer, said.rank)

    def add(self, report: WorkerReport) -> None:
        """Add a report; a worker's own failure replaces what the cluster reported of it."""
        known = self.reports.get(report.rank)
        if known is None or report.failure is not None:
            self.reports[report.rank] = report
        if report.failure is not None:
            self.has_failed = True

    def lose(self, failures: Iterable[Failure]) -> None:
        """Add failures of workers of which nothing else is known."""
        for failure in failures:
            if failure.rank not in self.reports:
                self.add(WorkerReport(failure.rank, failure.host, 0, failure=failure))

    def deadline(self) -> float:
        """Return when to stop waiting for running workers; infinity while the job continues.

        The clock is ``time.monotonic``. The report of a loss may arrive before the report that
        training has begun.
        """
        if fatal := self.find_fatal():
            usual = _SHORT_GRACE_SECONDS if _have_cause(fatal) else _GRACE_SECONDS
            grace = usual if self._grace is None else self._grace
            self._deadline = min(self._deadline, time.monotonic() + grace)
            return self._deadline
        self._deadline = math.inf
        self.announce_losses()
        return self._deadline

    def announce_losses(self) -> None:
        """Report the losses that training survives to the user, each of them once."""
        for rank, report in list(self.reports.items()):
            if (lost := report.failure) is not None and rank not in self._announced:
                self._announced.add(rank)
                text = f"worker {lost.rank} on {lost.host} was lost ({lost.message})"
                self._on_event(Note(f"{text}: training continues without it and its rows"))
                self._on_event(lost_at(lost))

    def find_fatal(self) -> list[Failure]:
        """Return the failures that end a job: all of them until asynchronous training begins."""
        reports = list(self.reports.values())
        if self._has_begun and self._job is not None and not self._ends_together:
            return find_fatal(self._job, reports)
        return [report.failure for report in reports if report.failure is not None]

    def follow(
        self,
        listen: Callable[[float], object],
        look: Callable[[], object] = lambda: None,
        check: Callable[[], object] = lambda: None,
        seconds: float = math.inf,
    ) -> None:
        """Wait until all workers have reported, or the time after the first failure is over.

        ``listen`` passes on what has arrived, or waits up to this many seconds for something.
        ``look`` passes on what the platform knows, and raises `ClusterError` if the workers cannot
        start or continue; it is raised here unless a worker has reported the cause. ``check`` is
        called as often, and its errors are raised immediately. ``seconds`` limits the time for all
        reports.
        """
        self.latest, trouble = min(self.latest, time.monotonic() + seconds), None
        while self.missing:
            check()
            check_stop()
            if time.monotonic() > min(self.latest, self.deadline()):
                break
            if trouble is not None and _have_cause(self.find_fatal()):
                break
            # A short wait, so that Ctrl-C is noticed by Python's main thread, and by R.
            listen(LOOK_SECONDS)
            if trouble is None:
                try:
                    look()
                except ClusterError as error:
                    trouble, self.latest = error, time.monotonic() + CAUSE_SECONDS
        listen(0)
        if trouble is not None and not self.find_fatal():
            raise trouble

    def conclude(self, explain: Explain = lambda one: one) -> list[WorkerReport]:
        """Return all reports by rank; `WorkerFailedError` if failures end the job.

        ``explain`` adds to a failure what only the launcher knows.
        """
        self.deadline()  # reports the last losses
        for rank in [] if self._ends_together else self.missing:
            text = "ended by the launcher because another worker failed"
            host = self._hosts if isinstance(self._hosts, str) else self._hosts[rank]
            self.lose([Failure(rank, host, "Stopped", text, time=time.time())])
        self.raise_any(explain)
        return [report for _, report in sorted(self.reports.items())]

    def raise_any(self, explain: Explain = lambda one: one) -> None:
        """Raise `WorkerFailedError` if failures end the job; the earliest is the cause."""
        if fatal := self.find_fatal():
            raise WorkerFailedError(root_cause_first([explain(one) for one in fatal]))


def take_all(events: queue.Queue[T], handle: Callable[[T], object], seconds: float) -> None:
    """Handle the items that a queue has; if it is empty, wait up to ``seconds`` for one."""
    # Not those that arrive meanwhile: when ranks printed without a pause, signals and failures were
    # never looked at (test_what_prints_without_a_pause_can_be_ended).
    for _ in range(max(1, events.qsize())):
        with suppress(queue.Empty):
            handle(events.get(timeout=max(seconds, 0.001)))


def follow_child(child: Child, say: Callable[[WorkerReport], object]) -> None:
    """Wait for a worker of this machine to end, in a thread, and pass on its report."""

    def wait() -> None:
        try:
            report = child.wait()
        except Exception as error:  # any error: else the launcher would wait forever
            kind, text = type(error).__name__, str(error)
            failure = Failure(child.rank, child.host, kind, text, time=time.time())
            report = WorkerReport(child.rank, child.host, child.pid, failure=failure)
        say(report)

    threading.Thread(target=wait, daemon=True).start()
