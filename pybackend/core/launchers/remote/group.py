"""The driver's side of workers on other hosts: of a group, or of elastic training, one by one."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from pybackend.core.errors import ClusterError, Failure, InputError, WorkerFailedError
from pybackend.core.job.codec import encode
from pybackend.core.job.job import Job, TrainingJob, argument_of
from pybackend.core.job.messages import Announced, Emit, Event, FromLauncher, Note, Reported
from pybackend.core.job.report import WorkerReport, read_report
from pybackend.core.job.worker_options import Elastic
from pybackend.core.launchers.base import DataSets, Outcome, StopRequestedError, stopped_by
from pybackend.core.launchers.crew import CAUSE_SECONDS, Crew, take_all
from pybackend.core.launchers.elastic_workers import Obstacle, Remark, Said, train_elastically
from pybackend.core.launchers.remote.task import PACKAGES, POST, REPORT, ROWS, Post, receive_model
from pybackend.core.machine.packages import TITLES, UNKNOWN, find_difference
from pybackend.core.net.meeting import MeetingServer

_MEET_SECONDS = 600.0
# For processes to end, and for their files to be removed.
_END_SECONDS = 150.0

# Function that waits for workers to end, as `run_group` does.
Follow = Callable[[Emit], Outcome]


@dataclass(frozen=True)
class Start:
    """Workers that are started together: those of a group, or one of elastic training.

    A worker of elastic training has a ``number``, a ``place`` as in `Site.start`, and a job with a
    single worker. ``note`` receives a `Note` when the state of pending workers changes.
    """

    job: Job
    meeting: MeetingServer
    note: Emit
    number: int | None = None
    place: int = 0

    def name(self, common: str) -> str:
        return common if self.number is None else f"{common}-{self.number}"

    def post(self, host_index: int = 0) -> dict[str, bytes]:
        """Return the file of the bundle that only this worker gets; a group has none."""
        if self.number is None:
            return {}
        return {POST: encode(Post(self.number, host_index)).encode()}


class Way(ABC):
    """Way of a cluster system to start workers. All methods may be called from threads."""

    @abstractmethod
    def name_host(self, number: int, place: int) -> str:
        """Return the name of an elastic worker's host, for messages."""

    def listen(self, workers: int) -> MeetingServer:
        """Return a server for the connections from these workers; here, of `adopt`ed ones."""
        return MeetingServer(None, "", workers)

    @abstractmethod
    def open(self, start: Start) -> AbstractContextManager[Follow]:
        """Start workers; on exit, end them and clean up."""


def run_on_hosts(
    way: Way, job: Job, datasets: DataSets, on_event: Emit, places: int, remedy: str
) -> Outcome:
    """Run a job to completion: all workers as a group, or one by one if it is elastic.

    ``places`` is the number of slots for elastic workers. ``remedy`` is as in `Member`, and errors
    as in `Launcher.launch`.
    """
    if isinstance(job, TrainingJob) and job.is_elastic:
        with RemoteSite(job, places, way, remedy) as site:
            return train_elastically(job, datasets, on_event, site)
    with way.listen(job.workers) as meeting, way.open(Start(job, meeting, on_event)) as follow:
        return follow(on_event)


def run_group(
    meeting: MeetingServer,
    job: Job,
    hosts: Sequence[str],
    on_event: Emit,
    look: Callable[[], Iterable[Failure]],
    meet_seconds: float = _MEET_SECONDS,
    explain: Callable[[Failure], Failure] = lambda failure: failure,
) -> Outcome:
    """Wait for workers that run `take_part`; errors as in `Launcher.launch`.

    ``look`` is called a few times a second. It returns the failures that the platform knows about,
    of which those of workers that have reported are ignored. It raises `ClusterError` if the
    workers cannot start or continue; a worker's report of the cause takes precedence.
    ``meet_seconds`` is the limit between the first worker's connection and the last one's.
    ``explain`` adds the platform's reason for SIGTERM to the failure of a preempted worker.
    """
    crew, left = Crew(job, on_event, meeting.order, hosts), dict[int, float]()

    def take(event: Event) -> None:
        if not isinstance(event, Reported):
            return crew.hear(event)
        content = meeting.result(event.rank, REPORT)
        return crew.hear(read_report(content, event.rank, hosts[event.rank]))

    def look_there() -> None:
        found = [*look(), *_find_lost(meeting, crew.missing, hosts, left)]
        # Reports of these workers before they were lost have precedence.
        listen(0)
        crew.lose(found)
        _check_meeting(meeting, hosts, meet_seconds)

    def explain_end(failure: Failure) -> Failure:
        return explain(failure) if failure.exception_type == "Preempted" else failure

    listen = partial(take_all, meeting.queue, take)
    crew.follow(listen, look_there)
    return Outcome(crew.conclude(explain_end), receive_model(meeting))


def _find_lost(
    meeting: MeetingServer, running: Iterable[int], hosts: Sequence[str], left: dict[int, float]
) -> list[Failure]:
    """Return the failures of workers that disconnected without a report or a known reason.

    ``left`` has the time at which each was first seen to have disconnected.
    """
    now, kind = time.monotonic(), "WorkerLost"
    why = "the worker's connection to the driver ended before it had reported"
    advice = "see that host's log: the host, or its connection to the driver, failed"
    return [
        Failure(rank, hosts[rank], kind, why, time=time.time(), advice=advice)
        for rank in running
        if meeting.has_left(rank) and now > left.setdefault(rank, now) + CAUSE_SECONDS
    ]


def _check_meeting(meeting: MeetingServer, hosts: Sequence[str], most: float) -> None:
    missing, seconds = meeting.missing()
    if missing and seconds > most:
        named = ", ".join(f"{rank} on {hosts[rank]}" for rank in missing)
        advice = "see the logs of these hosts, and check that they are running"
        late = f"did not connect to the others within {most:.0f} s"
        raise ClusterError(f"worker {named} {late}: {advice}")


class RemoteSite(AbstractContextManager["RemoteSite"]):
    """A `Site` whose workers a cluster system starts; a context manager that stops them."""

    def __init__(self, job: TrainingJob, places: int, way: Way, remedy: str) -> None:
        # Each worker is a group of its own, in which its rank is 0.
        self.job = replace(job, workers=1, elastic=Elastic())
        self.places = places
        self.way = way
        self.is_over = threading.Event()
        self._remedy = remedy
        self._lock = threading.Lock()
        self._packages: dict[int, tuple[str, Mapping[str, str]]] = {}
        self._rows: tuple[int, Mapping[str, str]] | None = None
        self._workers: list[_RemoteWorker] = []

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())

    def start(self, number: int, place: int, say: Callable[[Said], None]) -> _RemoteWorker:
        self._workers.append(_RemoteWorker(self, number, place, say))
        return self._workers[-1]

    def compare_packages(self, number: int, host: str, versions: Mapping[str, str]) -> None:
        with self._lock:
            known = {**self._packages, number: (host, versions)}
            unknown = ("", dict.fromkeys(TITLES, UNKNOWN))
            every = [known.get(n, unknown) for n in range(max(known) + 1)]
            hosts, found = zip(*every, strict=True)
            if difference := find_difference(hosts, found, self._remedy):
                raise ClusterError(difference[1])
            self._packages = known

    def compare_rows(self, number: int, host: str, digests: Mapping[str, str]) -> None:
        with self._lock:
            first, known = self._rows = self._rows or (number, digests)
        for name, digest in digests.items():
            if digest != known[name]:
                own = f"worker {number} on {host} got other rows of `{argument_of(name)}`"
                raise ClusterError(
                    f"{own} than worker {first}: Spark computes them for each worker of elastic "
                    "training, and the results differ, for example because of random numbers. "
                    "Write the rows to Parquet files, and read them from there"
                )


@dataclass(eq=False)
class _RemoteWorker:
    """A `Worker` that runs `take_part`, and a thread that starts it, follows it and cleans up."""

    site: RemoteSite
    number: int
    place: int
    say: Callable[[Said], None]

    def __post_init__(self) -> None:
        self._meeting = self.site.way.listen(1)
        self._model: tuple[str, bytes] | None = None
        self._thread = threading.Thread(target=self._to_its_end, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads, or processes
            self._meeting.close()
            raise ClusterError(f"no worker can be started on {self.host}: {error}") from error

    @property
    def host(self) -> str:
        return self.site.way.name_host(self.number, self.place)

    def go(self, order: FromLauncher) -> None:
        self._meeting.order(order)

    def model(self) -> tuple[str, bytes] | None:
        return self._model

    def close(self) -> None:
        """Do nothing: its thread cleans up."""

    def wait(self, seconds: float) -> None:
        self._thread.join(max(0.1, seconds))

    def _to_its_end(self) -> None:
        site, report = self.site, None
        try:
            with self._meeting as meeting:
                start = Start(site.job, meeting, self._note, self.number, self.place)
                with site.way.open(start) as follow:
                    report = self._find_end(follow)
                    self.say(report)
        except StopRequestedError:  # the training has ended, so this worker is no longer needed
            pass
        except Exception as error:  # any error: else the driver would wait for this worker
            if not isinstance(error, (ClusterError, InputError)):
                error = ClusterError(f"the driver lost the connection to {self.host}: {error!r}")
            if report is None:
                self.say(Obstacle(error, self.number))

    def _find_end(self, follow: Follow) -> WorkerReport:
        try:
            with stopped_by(self.site.is_over):
                outcome = follow(self._hear)
        except WorkerFailedError as error:
            failure = replace(error.failures[0], rank=self.number)
            return WorkerReport(self.number, self.host, 0, failure=failure)
        self._model = outcome.model
        return replace(outcome.reports[0], rank=self.number)

    def _note(self, event: Event) -> None:
        if isinstance(event, Note):
            self.say(Remark(event.text))

    def _hear(self, event: Event) -> None:
        if isinstance(event, Announced) and event.name == PACKAGES:
            self.site.compare_packages(self.number, self.host, json.loads(event.text))
        elif isinstance(event, Announced) and event.name == ROWS:
            self.site.compare_rows(self.number, self.host, json.loads(event.text))
        else:
            self.say(replace(event, rank=self.number))
