"""This process as one of several that users start themselves and that make the same call.

Each starts one worker on its own machine, with its own share of the rows. They connect to the first
process, which collects the reports and sends the result to all. Only plain data is sent: every
process has its own model, functions and rows, which are compared where possible.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from pybackend.core.data.arrays import Columns, shard
from pybackend.core.data.row_store import write_columns
from pybackend.core.errors import ClusterError, Failure, Moment, WorkerFailedError, root_cause_first
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import TRAINED, AnyJob, Job
from pybackend.core.job.messages import Emit, Event, FromLauncher, Reported, answer_of
from pybackend.core.job.notice import Notice, at_own_end
from pybackend.core.job.report import WorkerReport, read_report
from pybackend.core.launchers.base import DataSets, Files, Outcome, Submission, reject_environment
from pybackend.core.launchers.crew import Crew, describe_silence, take_all
from pybackend.core.launchers.fork_server import forking_workers
from pybackend.core.launchers.joined import gathering
from pybackend.core.launchers.joined.gathering import CallGroup, JoinedCall
from pybackend.core.launchers.joined.place import Place, find_place, split_host
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.remote.task import MODEL, REPORT, send_results
from pybackend.core.net.authentication import derive_token, find_secret
from pybackend.core.net.liveness import SHORTEST_SILENCE, find_silence
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient

_RESULTS = "results"
# The callbacks of the first process may take long after training.
_RESULT_SECONDS = 6 * 3600.0
_LEAVE_SECONDS = 60.0


class JoinedLauncher:
    where = "processes that you start yourself, including this one"
    is_here = True
    session = None
    why_fixed = "processes that you start yourself have a fixed number and fixed ranks"
    why_bound = (
        "this process is itself one of the workers: start the processes where they outlive you, "
        "for example with sbatch"
    )
    calls = 0
    """Number of finished calls of this process."""

    def __init__(self, place: Place, secret: str) -> None:
        self.place = place
        self._secret = secret
        self.workers = place.size

    def check(self, job: Job) -> None:
        reject_environment(job, "start each process with the Python that it should have")

    @property
    def is_first(self) -> bool:
        """True if this is the process that receives the events of all others, for trackers."""
        return self.place.rank == 0

    def describe(self, job: Job) -> Submission:
        place = self.place
        hosts = [f"host {split_host(peer)}" for peer in place.peers]
        workers = hosts or ["its own process"] * job.workers
        workers[place.rank] = "this process"
        later = ("the calls of all processes are compared when they connect",)
        return Submission(tuple(workers), later=later)

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        """Run a job; all processes have to call this."""
        self.check(job)
        place = self.place
        token = derive_token(self._secret, "processes that join")
        claims = gathering.describe_call(JoinedLauncher.calls + 1, job, files, datasets)
        rows = _OwnRows(datasets, job.workers, job.shuffles_globally)
        member = Member(job, files, rows, token, None, place.is_one_machine)
        call = JoinedCall(place, member, claims, on_event)
        notice = Notice()
        processes = max(place.local_size, place.size if place.is_one_machine else 1)
        with forking_workers(processes):
            outcome = _lead(call, notice) if place.rank == 0 else _follow(call, notice)
        notice.pass_on()
        # A call that fails in one process before all have met must not be counted only there.
        JoinedLauncher.calls += 1
        return outcome


def launcher_of(target: Any) -> JoinedLauncher | None:
    """Return a launcher if the first argument is None and this process is one of several."""
    place = find_place() if target is None else None
    return None if place is None else JoinedLauncher(place, find_secret(place.is_one_machine))


@dataclass(frozen=True)
class _OwnRows:
    datasets: Mapping[str, Columns]  # all rows that were passed to the call in this process
    workers: int
    has_all: bool

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        for name, rows in self.datasets.items():
            if name != "train" or not self.has_all:
                rows = shard(rows, self.workers, rank)
            write_columns(folder / name, rows)


@dataclass(frozen=True)
class _Results:
    """Results that the first process sends to all others: reports by rank, and its job."""

    reports: tuple[WorkerReport, ...]
    job: AnyJob


def _lead(call: JoinedCall, notice: Notice) -> Outcome:
    """Run the first process: its worker, and the collection of all reports."""
    place, member = call.place, call.member
    with ExitStack() as stack:
        server = stack.enter_context(gathering.open_server(place))
        own, silence = server.dup(), find_silence(member.job.timeout)
        meeting = MeetingServer("", member.token, place.size, server=own, silence=silence)
        stack.enter_context(meeting)
        meeting.start_beating(SHORTEST_SILENCE)  # others may have another timeout
        group = CallGroup(call, partial(gathering.meet_others, call, meeting))
        others = _Others(call, meeting)
        report, model = _work(call, group, server, others.give_up, notice)
        reports = others.wait(report)
        results = _Results(tuple(reports), cast("AnyJob", group.job))
        contents = {_RESULTS: encode(results).encode()}
        if model is not None and all(report.ok for report in reports):
            contents[MODEL + model[0]] = model[1]
        meeting.send(contents)
        meeting.drain(_LEAVE_SECONDS)
        return _conclude(results, model)


def _follow(call: JoinedCall, notice: Notice) -> Outcome:
    """Run any other process: its worker, whose report is sent to the first process."""
    place, token, timeout = call.place, call.member.token, call.member.job.timeout
    silence, meeting = find_silence(timeout), gathering.find_meeting(place)
    connect = partial(MeetingClient, meeting, token, place.rank, timeout, silence=silence)
    with gathering.open_server(place) as server, connect(is_early=True) as client:
        client.start_beating(SHORTEST_SILENCE)
        group = CallGroup(call, partial(gathering.meet_first, call, client))

        def give_up() -> str | None:
            return f"{place.name(0)} ended the call" if client.has_ended else None

        def emit(event: Event) -> object:
            if isinstance(event, Moment):
                client(event)
            return call.emit(event)

        report, _ = _work(replace(call, emit=emit), group, server, give_up, notice)
        received = _receive(call, client, report)
        if received is None and client.is_silent:
            silent = describe_silence(0, _host(place, 0), silence)
            # Without that process, no restart is possible.
            raise WorkerFailedError([replace(silent, exception_type="ProcessLost")])
        if received is None:
            raise _explain_loss(place, report)
        models = [(k, received[MODEL + k]) for k in TRAINED if MODEL + k in received]
        results = _read_results(received.get(_RESULTS), place)
        return _conclude(results, models[0] if models else None)


def _work(
    call: JoinedCall,
    group: CallGroup,
    server: socket.socket,
    give_up: Callable[[], str | None],
    notice: Notice,
) -> tuple[WorkerReport, tuple[str, bytes] | None]:
    inbox = Inbox(call.emit)

    def look() -> str | None:
        inbox.pass_on()
        return give_up()

    options = (None, server, look, notice, inbox.poll_order)
    report, model = call.member.work(group, (), inbox, *options)
    inbox.pass_on()
    if group.error is not None:
        raise group.error
    if report.failure is not None:
        return replace(report, failure=at_own_end(report.failure, notice)), model
    return report, model


def _receive(
    call: JoinedCall, client: MeetingClient, report: WorkerReport
) -> Mapping[str, bytes] | None:
    """Send the report, and wait for the results; None if the first process is lost."""
    reminder = gathering.Reminder(call)
    with suppress(ClusterError):  # it may have ended the call already, and sent the reason
        send_results(client, report, None)
        client(Reported())
    awaited = f"the result of {call.place.name(0)}"
    with suppress(TimeoutError):
        return client.receive(_RESULT_SECONDS, lambda: reminder.look(awaited))
    return None


def _explain_loss(place: Place, report: WorkerReport) -> Exception:
    if report.failure is not None and not report.failure.is_consequence:
        return WorkerFailedError([report.failure])
    return ClusterError(
        f"{place.name(place.rank)} lost {place.name(0)}, which sends the result to all processes: "
        "its process ended, or the network connection to it failed. See what it printed"
    )


class _Others:
    """The other processes, as seen by the first one after all have connected."""

    def __init__(self, call: JoinedCall, meeting: MeetingServer) -> None:
        self._call = call
        self._meeting = meeting
        self._crew = Crew(call.member.job, lambda event: None)

    def give_up(self) -> str | None:
        """Return the reason to stop waiting for this process's own worker, or None."""
        self._look()
        is_over = time.monotonic() > self._crew.deadline()
        return "ended because another worker failed" if is_over else None

    def wait(self, own: WorkerReport) -> list[WorkerReport]:
        """Return all reports by rank; for a process that ended without a report, a failure."""
        place, reminder, crew = self._call.place, gathering.Reminder(self._call), self._crew

        def listen(seconds: float) -> None:
            if crew.missing:
                reminder.look(", ".join(map(place.name, crew.missing)))
            time.sleep(seconds)
            self._look()

        crew.hear(own)
        crew.follow(listen, seconds=_RESULT_SECONDS)
        for rank in crew.missing:
            crew.lose([_lost(place, rank, "did not report: it may have been stopped")])
        return [crew.reports[rank] for rank in range(place.size)]

    def _look(self) -> None:
        # First the disconnected processes, then the messages that they sent before.
        place, seconds = self._call.place, find_silence(self._call.member.job.timeout)
        left = [r for r in range(1, place.size) if self._meeting.has_left(r)]
        silent = [rank for rank in self._meeting.silent() if rank in left]
        take_all(self._meeting.queue, self._take, 0)
        reason = "ended without a report: it was interrupted, or killed"
        self._crew.lose(describe_silence(r, _host(place, r), seconds) for r in silent)
        self._crew.lose(_lost(place, rank, reason) for rank in left)

    def _take(self, event: Event) -> None:
        if isinstance(event, Reported):
            content = self._meeting.result(event.rank, REPORT)
            self._crew.hear(read_report(content, event.rank, _host(self._call.place, event.rank)))
        elif isinstance(event, Moment):
            self._call.emit(event)


def _lost(place: Place, rank: int, reason: str) -> Failure:
    text = f"the process {reason}"
    advice = "see the output of that process, and restart all of them"
    return Failure(rank, _host(place, rank), "ProcessLost", text, time=time.time(), advice=advice)


def _host(place: Place, rank: int) -> str:
    return split_host(place.peers[rank]) if place.peers else "its host"


def _read_results(content: bytes | None, place: Place) -> _Results:
    try:
        return decode(content or b"", _Results)
    except ValueError as error:
        raise ClusterError(
            f"the result that {place.name(0)} sent cannot be read ({error}): install the "
            "same release of tfdist on all machines, and start all processes again"
        ) from error


def _conclude(results: _Results, model: tuple[str, bytes] | None) -> Outcome:
    if failures := [report.failure for report in results.reports if report.failure is not None]:
        raise WorkerFailedError(root_cause_first(failures))
    return Outcome(list(results.reports), model, results.job)


# Events of this process's own worker, between the reading thread and the calling one.


class Inbox:
    """Events to be forwarded by the thread that waits for the worker: R has one thread."""

    def __init__(self, on_event: Emit) -> None:
        self._on_event = on_event
        self._events: queue.Queue[Event] = queue.Queue()
        self._orders: queue.Queue[FromLauncher] = queue.Queue()

    def __call__(self, event: Event) -> None:
        """Store an event; callable on any thread."""
        self._events.put(event)

    def pass_on(self) -> None:
        """Forward all stored events; answers are for the worker."""

        def forward(event: Event) -> None:
            if answer := answer_of(self._on_event, event):
                self._orders.put(answer)

        take_all(self._events, forward, 0)

    def poll_order(self) -> FromLauncher | None:
        """Return the next answer for the worker, or None."""
        with suppress(queue.Empty):
            return self._orders.get_nowait()
        return None
