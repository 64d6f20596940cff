"""The driver's side of a worker group on other hosts: from the workers' events to the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pybackend.errors import ClusterError, Failure
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Event, Reported
from pybackend.job.report import read_report
from pybackend.launchers.base import Outcome
from pybackend.launchers.crew import CAUSE_SECONDS, Crew, take_all
from pybackend.launchers.remote.task import REPORT, receive_model
from pybackend.net.meeting import MeetingServer

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
    crew, left = Crew(job, on_event, meeting.order, hosts), dict[int, float]()

    def take(event: Event) -> None:
        if isinstance(event, Reported):
            content = meeting.result(event.rank, REPORT)
            crew.hear(read_report(content, event.rank, hosts[event.rank]))
        else:
            crew.hear(event)

    def look_there() -> None:
        found = [*look(), *_find_lost(meeting, crew.missing, hosts, left)]
        # Reports of these workers before they were lost have precedence.
        listen(0)
        crew.lose(found)
        _check_meeting(meeting, hosts, meet_seconds)

    def explain_end(failure: Failure) -> Failure:
        return explain(failure) if failure.exception_type == "Preempted" else failure

    listen = partial(take_all, meeting.queue, take)
    crew.follow(listen, look_there, check)
    return Outcome(crew.conclude(explain_end), receive_model(meeting))


def _find_lost(
    meeting: MeetingServer, running: Iterable[int], hosts: Sequence[str], left: dict[int, float]
) -> list[Failure]:
    """Return the failures of workers that disconnected without a report or a known reason.

    ``left`` has the time at which each was first seen to have disconnected.
    """
    now = time.monotonic()
    return [
        Failure(
            rank,
            hosts[rank],
            exception_type="WorkerLost",
            message="the worker's connection to the driver ended before it had reported",
            time=time.time(),
            advice="see that host's log: the host, or its connection to the driver, failed",
        )
        for rank in running
        if meeting.has_left(rank) and now > left.setdefault(rank, now) + CAUSE_SECONDS
    ]


def _check_meeting(meeting: MeetingServer, hosts: Sequence[str], most: float) -> None:
    missing, seconds = meeting.missing()
    if missing and seconds > most:
        named = ", ".join(f"{rank} on {hosts[rank]}" for rank in missing)
        raise ClusterError(
            f"worker {named} did not connect to the others within {most:.0f} s: see the logs of "
            "these hosts, and check that they are running"
        )
