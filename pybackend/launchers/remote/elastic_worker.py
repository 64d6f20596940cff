"""The driver's side of one worker of an elastic training on a host of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from pybackend.errors import ClusterError, WorkerFailedError
from pybackend.job.job import TrainingJob
from pybackend.job.messages import Announced, Emit, Event, FromLauncher
from pybackend.job.packages import TITLES, UNKNOWN, find_difference
from pybackend.job.report import WorkerReport
from pybackend.launchers.base import Outcome
from pybackend.launchers.elastic import Obstacle, Said
from pybackend.launchers.remote.elastic_task import PACKAGES
from pybackend.net.meeting import MeetingServer


def as_gang(job: TrainingJob) -> TrainingJob:
    """The job as `run_gang` follows it for one worker."""
    return replace(job, workers=1, min_workers=1, max_workers=None)


class Packages:
    """What the workers so far have announced of their Pythons; ``remedy`` is as in `Member`."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._lock = threading.Lock()
        self._known: dict[int, tuple[str, Mapping[str, str]]] = {}

    def compare(self, number: int, host: str, versions: Mapping[str, str]) -> None:
        """Take in a further worker's.

        Raises
        ------
        ClusterError
            They are not those of the workers before.
        """
        with self._lock:
            known = {**self._known, number: (host, versions)}
            unknown = ("", dict.fromkeys(TITLES, UNKNOWN))
            every = [known.get(n, unknown) for n in range(max(known) + 1)]
            hosts, found = zip(*every, strict=True)
            if difference := find_difference(hosts, found, self._remedy):
                raise ClusterError(difference[1])
            self._known = known


class RemoteWorker:
    """A worker that runs `pybackend.launchers.remote.elastic_task.follow_orders`; see `Worker`.

    Parameters
    ----------
    number, say
        As in `Site.start`.
    host
        For messages.
    packages
        Of all workers.

    Attributes
    ----------
    meeting
        Of this worker alone, whose rank is 0 there.
    """

    def __init__(
        self, number: int, host: str, say: Callable[[Said], None], packages: Packages
    ) -> None:
        self.host = host
        self.meeting = MeetingServer(None, "", 1)
        self._number = number
        self._say = say
        self._packages = packages
        self._model: tuple[str, bytes] | None = None
        self._thread: threading.Thread | None = None

    def follow(self, run: Callable[[Emit], Outcome], leave: Callable[[], None]) -> None:
        """Follow it to its end, from a thread.

        Parameters
        ----------
        run
            Is given what takes its events, and returns or raises as `run_gang` does.
        leave
            Called at last, whatever has come of it.
        """

        def to_its_end() -> None:
            try:
                with self.meeting:
                    self._say(self._find_end(run))
            finally:
                leave()

        self._thread = threading.Thread(target=to_its_end, daemon=True)
        self._thread.start()

    def go(self, order: FromLauncher) -> None:
        """See `Worker`."""
        self.meeting.order(order)

    def model(self) -> tuple[str, bytes] | None:
        """See `Worker`."""
        return self._model

    def close(self) -> None:
        """See `Worker`: `follow` has left it."""

    def wait(self, seconds: float) -> None:
        """Wait until it has ended and was left."""
        if self._thread is not None:
            self._thread.join(max(0.1, seconds))

    def _find_end(self, run: Callable[[Emit], Outcome]) -> Said:
        try:
            outcome = run(self._hear)
        except WorkerFailedError as error:
            failure = replace(error.failures[0], rank=self._number)
            return WorkerReport(self._number, self.host, 0, failure=failure)
        except ClusterError as error:
            return Obstacle(error, self._number)
        except Exception as error:  # whatever it is, it must not leave the launcher waiting
            return Obstacle(ClusterError(f"the driver lost {self.host}: {error!r}"), self._number)
        self._model = outcome.model
        return replace(outcome.reports[0], rank=self._number)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Announced) and event.name == PACKAGES:
            self._packages.compare(self._number, self.host, json.loads(event.text))
        else:
            self._say(replace(event, rank=self._number))
