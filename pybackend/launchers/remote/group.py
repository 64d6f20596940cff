"""The driver's side of a worker group on other hosts: from the workers' events to the outcome."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pybackend.errors import ClusterError, Failure
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Event, Failed, Reported
from pybackend.job.report import WorkerReport, read_report
from pybackend.launchers.base import Outcome
from pybackend.launchers.failures import Failures
from pybackend.launchers.remote.task import REPORT, receive_model
from pybackend.launchers.stopping import check_stop
from pybackend.net.meeting import MeetingServer

_LOOK_SECONDS = 0.1
# Messages of the platform and of a worker may be in transit at the same time.
_CAUSE_SECONDS = 2.0
_MEET_SECONDS = 600.0


def run_group(
    meeting: MeetingServer,
    job: Job,
    hosts: Sequence[str],
    on_event: Emit,
    look: Callable[[], Iterable[Failure]],
    meet_seconds: float = _MEET_SECONDS,
    explain: Callable[[Failure], Failure] = lambda failure: failure,
    check: Callable[[], None] = lambda: None,
) -> Outcome:
    """Wait for workers that run `pybackend.launchers.remote.task.take_part`.

    Parameters
    ----------
    meeting
        Server to which they connect.
    hosts
        Host of each rank, for messages.
    look
        Called a few times a second: returns the failures that the platform knows about. Failures of
        workers that have reported are ignored. It raises `ClusterError` if the workers cannot start
        or continue; a worker's report of the cause takes precedence.
    meet_seconds
        Maximum seconds between the first worker's connection and the last one's.
    explain
        Adds the platform's reason for SIGTERM to the failure of a preempted worker.
    check
        Called as often as `look`; its errors are raised immediately.

    Raises
    ------
    ClusterError, WorkerFailedError
        As in `Launcher.launch`.
    """
    return _RemoteGroup(meeting, job, hosts, on_event, meet_seconds, explain).run(look, check)


@dataclass
class _RemoteGroup:
    meeting: MeetingServer
    job: Job
    hosts: Sequence[str]
    on_event: Emit
    meet_seconds: float
    explain: Callable[[Failure], Failure]

    def __post_init__(self) -> None:
        self._failures = Failures(self.on_event)
        self._reports: dict[int, WorkerReport] = {}
        self._left: dict[int, float] = {}

    def run(self, look: Callable[[], Iterable[Failure]], check: Callable[[], None]) -> Outcome:
        deadline, trouble = float("inf"), None
        while self._running():
            check()
            check_stop()
            if time.monotonic() > min(deadline, self._deadline()):
                break
            # A short wait, so that Ctrl-C is noticed by Python's main thread, and by R.
            self._take_events(_LOOK_SECONDS)
            if trouble is None:
                try:
                    found = [*look(), *self._find_lost()]
                    # Reports of these workers before they were lost have precedence.
                    self._take_events(0)
                    self._add(found)
                    self._check_meeting()
                except ClusterError as error:
                    trouble, deadline = error, time.monotonic() + _CAUSE_SECONDS
        self._take_events(0)
        self._deadline()  # the last losses are reported, too
        self._failures.add(self._failures.find_fatal(self.job, self._reports.values()))
        self._failures.raise_any()
        if trouble is not None:
            raise trouble
        reports = [self._reports[rank] for rank in range(self.job.workers)]
        return Outcome(reports, receive_model(self.meeting))

    def _running(self) -> list[int]:
        """Return the ranks without a report or failure."""
        return [rank for rank in range(self.job.workers) if rank not in self._reports]

    def _deadline(self) -> float:
        return self._failures.deadline(self.job, self._reports.values())

    def _take_events(self, seconds: float) -> None:
        """Handle all received events; if there are none, wait briefly for one."""
        try:
            self._take(self.meeting.queue.get(timeout=max(seconds, 0.001)))
            while True:
                self._take(self.meeting.queue.get_nowait())
        except queue.Empty:
            pass

    def _take(self, event: Event) -> None:
        if isinstance(event, Failed):
            self._add([event.failure])
        elif isinstance(event, Reported):
            rank = event.rank
            content = self.meeting.result(rank, REPORT)
            report = read_report(content, rank, self.hosts[rank])
            if report.failure is not None:
                if report.failure.exception_type == "Preempted":
                    report = replace(report, failure=self.explain(report.failure))
            elif rank in self._reports:  # it is known to have failed
                return
            self._reports[rank] = report
        elif answer := self._failures(event):
            self.meeting.order(answer, event.rank)

    def _add(self, failures: Iterable[Failure]) -> None:
        """Add failures of workers without a report or failure."""
        for failure in failures:
            if failure.rank not in self._reports:
                self._reports[failure.rank] = WorkerReport(
                    failure.rank, failure.host, 0, failure=failure
                )

    def _find_lost(self) -> list[Failure]:
        """Return the failures of workers that disconnected without a report or a known reason."""
        now = time.monotonic()
        left = [rank for rank in self._running() if self.meeting.has_left(rank)]
        return [
            Failure(
                rank,
                self.hosts[rank],
                exception_type="WorkerLost",
                message="the worker's connection to the driver ended before it had reported",
                time=time.time(),
                advice="see that host's log: the host, or its connection to the driver, failed",
            )
            for rank in left
            if now > self._left.setdefault(rank, now) + _CAUSE_SECONDS
        ]

    def _check_meeting(self) -> None:
        missing, seconds = self.meeting.missing()
        if missing and seconds > self.meet_seconds:
            named = ", ".join(f"{rank} on {self.hosts[rank]}" for rank in missing)
            raise ClusterError(
                f"worker {named} did not connect to the others within {self.meet_seconds:.0f} s: "
                "see the logs of these hosts, and check that they are running"
            )
