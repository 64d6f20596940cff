"""Workers for elastic training that a cluster system starts one by one on other hosts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from pybackend.errors import ClusterError, InputError, WorkerFailedError
from pybackend.job.job import TrainingJob, argument_of
from pybackend.job.messages import Announced, Emit, Event, FromLauncher, Note
from pybackend.job.options import Elastic
from pybackend.job.packages import TITLES, UNKNOWN, find_difference
from pybackend.job.report import WorkerReport
from pybackend.launchers.base import Outcome
from pybackend.launchers.elastic import Obstacle, Remark, Said
from pybackend.launchers.remote.elastic_task import PACKAGES, ROWS
from pybackend.net.meeting import MeetingServer

# For processes to end, and for their files to be removed.
_END_SECONDS = 150.0


class Follow(Protocol):
    """Function that waits for one worker to end, as `run_group` does."""

    def __call__(self, *, on_event: Emit, check: Callable[[], None]) -> Outcome: ...


class Way(Protocol):
    """Way to start one worker. All methods may be called from threads."""

    def name_host(self, number: int, place: int) -> str:
        """Return the name of a worker's host, for messages."""

    def make_meeting(self) -> MeetingServer:
        """Return a server for the connection from a single worker."""

    def open(
        self, number: int, place: int, meeting: MeetingServer, note: Emit
    ) -> AbstractContextManager[Follow]:
        """Start a worker; on exit, end it and clean up.

        Parameters
        ----------
        number, place
            As in `Site.start`.
        note
            Receives a `Note` when the state of a pending worker changes.
        """


def as_group(job: TrainingJob) -> TrainingJob:
    """Return the job of one worker for `run_group`."""
    return replace(job, workers=1, elastic=Elastic())


class RemoteSite:
    """A `Site` whose workers a cluster system starts; a context manager that stops them.

    Parameters
    ----------
    places
        As in `Site`.
    remedy
        As in `Member`.
    """

    def __init__(self, places: int, way: Way, remedy: str) -> None:
        self.places = places
        self.way = way
        self.packages = _Packages(remedy)
        self.rows = _Rows()
        self._workers: list[_RemoteWorker] = []
        self._is_over = threading.Event()

    def __enter__(self) -> RemoteSite:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())

    def start(self, number: int, place: int, say: Callable[[Said], None]) -> _RemoteWorker:
        worker = _RemoteWorker(self, number, place, say)
        worker.follow()
        self._workers.append(worker)
        return worker

    def check(self) -> None:
        """Raise an error once the training has ended."""
        if self._is_over.is_set():
            raise _OverError("the training has ended")


class _OverError(Exception):
    """Training has ended, so this worker is no longer needed."""


class _Packages:
    """Packages that the workers have announced so far; ``remedy`` is as in `Member`."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._lock = threading.Lock()
        self._known: dict[int, tuple[str, Mapping[str, str]]] = {}

    def compare(self, number: int, host: str, versions: Mapping[str, str]) -> None:
        """Compare the packages of a new worker with those of the others.

        Raises
        ------
        ClusterError
            The packages differ.
        """
        with self._lock:
            known = {**self._known, number: (host, versions)}
            unknown = ("", dict.fromkeys(TITLES, UNKNOWN))
            every = [known.get(n, unknown) for n in range(max(known) + 1)]
            hosts, found = zip(*every, strict=True)
            if difference := find_difference(hosts, found, self._remedy):
                raise ClusterError(difference[1])
            self._known = known


class _Rows:
    """Digests of the rows that the first worker has announced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[int, Mapping[str, str]] | None = None

    def compare(self, number: int, host: str, digests: Mapping[str, str]) -> None:
        """Compare the digests of a worker's rows with those of the first one.

        Raises
        ------
        ClusterError
            A data set differs.
        """
        with self._lock:
            first, known = self._known = self._known or (number, digests)
        for name, digest in digests.items():
            if digest != known[name]:
                raise ClusterError(
                    f"worker {number} on {host} got other rows of `{argument_of(name)}` than "
                    f"worker {first}: Spark computes them for each worker of elastic training, and "
                    "the results differ, for example because of random numbers. Write the rows to "
                    "Parquet files, and read them from there"
                )


class _RemoteWorker:
    """A `Worker` that runs `pybackend.launchers.remote.elastic_task.follow_orders`."""

    def __init__(
        self, site: RemoteSite, number: int, place: int, say: Callable[[Said], None]
    ) -> None:
        self._site = site
        self._number = number
        self._place = place
        self._say = say
        self._meeting = site.way.make_meeting()  # a separate one, in which its rank is 0
        self._model: tuple[str, bytes] | None = None
        self._thread = threading.Thread(target=self._to_its_end, daemon=True)

    @property
    def host(self) -> str:
        return self._site.way.name_host(self._number, self._place)

    def follow(self) -> None:
        """Start the worker and wait for it to end, in a thread."""
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads, or processes
            with self._meeting:
                pass
            raise ClusterError(f"no worker can be started on {self.host}: {error}") from error

    def go(self, order: FromLauncher) -> None:
        self._meeting.order(order)

    def model(self) -> tuple[str, bytes] | None:
        return self._model

    def close(self) -> None:
        """Do nothing: its thread cleans up."""

    def wait(self, seconds: float) -> None:
        """Wait until the worker has ended and been cleaned up."""
        self._thread.join(max(0.1, seconds))

    def _to_its_end(self) -> None:
        said = None
        try:
            with self._meeting as meeting, self._open(meeting) as follow:
                said = self._find_end(follow)
                self._say(said)
        except Exception as error:
            if said is None:
                self._say(self._describe_obstacle(error))

    def _open(self, meeting: MeetingServer) -> AbstractContextManager[Follow]:
        return self._site.way.open(self._number, self._place, meeting, self._note)

    def _find_end(self, follow: Follow) -> Said:
        try:
            outcome = follow(on_event=self._hear, check=self._site.check)
        except WorkerFailedError as error:
            failure = replace(error.failures[0], rank=self._number)
            return WorkerReport(self._number, self.host, 0, failure=failure)
        self._model = outcome.model
        return replace(outcome.reports[0], rank=self._number)

    def _describe_obstacle(self, error: Exception) -> Obstacle:
        """Return an obstacle for any error, so that the launcher does not wait forever."""
        if not isinstance(error, (ClusterError, InputError)):
            error = ClusterError(f"the driver lost the connection to {self.host}: {error!r}")
        return Obstacle(error, self._number)

    def _note(self, event: Event) -> None:
        if isinstance(event, Note):
            self._say(Remark(event.text))

    def _hear(self, event: Event) -> None:
        if isinstance(event, Announced) and event.name == PACKAGES:
            self._site.packages.compare(self._number, self.host, json.loads(event.text))
        elif isinstance(event, Announced) and event.name == ROWS:
            self._site.rows.compare(self._number, self.host, json.loads(event.text))
        else:
            self._say(replace(event, rank=self._number))
