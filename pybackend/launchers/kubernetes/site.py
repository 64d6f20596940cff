"""Where the workers of an elastic training on Kubernetes run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from pybackend.errors import ClusterError
from pybackend.job.job import Job, TrainingJob
from pybackend.job.messages import Emit, Note
from pybackend.launchers.base import Outcome
from pybackend.launchers.elastic import Remark, Said
from pybackend.launchers.remote.bundle import Bundle
from pybackend.launchers.remote.elastic_task import POST, Post
from pybackend.launchers.remote.elastic_worker import Packages, RemoteWorker, as_gang
from pybackend.launchers.remote.row_files import files_of_ranks
from pybackend.net.meeting import MeetingServer

# For the Jobs to be deleted.
_END_SECONDS = 60.0


class Follow(Protocol):
    """Follows the workers of a Job to their end, as `run_gang`."""

    def __call__(self, on_event: Emit, check: Callable[[], None] = ...) -> Outcome:
        """``check`` is called again and again, and may raise."""


class PodSite:
    """A `Site`: a Job with one pod for each worker; a context manager, which deletes them.

    Parameters
    ----------
    open_job
        Creates a Job, from its name, the job, a meeting, the pod's bundle and who is told what
        the pod waits for; gives what follows it to its end.
    name
        What the names of all its Jobs begin with.
    contents, folder
        What every worker gets, and where the files of the rows are.
    remedy
        As in `Member`.
    """

    def __init__(
        self,
        job: TrainingJob,
        open_job: Callable[
            [str, Job, MeetingServer, Callable[[int], Bundle], Emit], AbstractContextManager[Follow]
        ],
        name: str,
        contents: Mapping[str, bytes],
        folder: Path,
        remedy: str,
    ) -> None:
        self.places = job.most_workers
        self._job = as_gang(job)
        self._open_job = open_job
        self._name = name
        self._contents = contents
        self._folder = folder
        self._packages = Packages(remedy)
        self._workers: list[RemoteWorker] = []
        self._is_over = threading.Event()

    def __enter__(self) -> PodSite:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())

    def start(self, number: int, place: int, say: Callable[[Said], None]) -> RemoteWorker:
        """See `Site`."""
        name = f"{self._name}-{number}"
        own = {POST: json.dumps(asdict(Post(number, 0, 1, 0))).encode()}
        bundle = Bundle({**self._contents, **own}, files_of_ranks(self._folder, []))
        worker = RemoteWorker(number, name, say, self._packages)
        self._workers.append(worker)
        stack = ExitStack()

        def remark(event: object) -> None:
            if isinstance(event, Note):
                say(Remark(event.text))

        def run(hear: Emit) -> Outcome:
            opened = self._open_job(name, self._job, worker.meeting, lambda _: bundle, remark)
            return stack.enter_context(opened)(hear, self._check)

        worker.follow(run, stack.close)
        return worker

    def _check(self) -> None:
        if self._is_over.is_set():
            raise ClusterError("the training has ended")
