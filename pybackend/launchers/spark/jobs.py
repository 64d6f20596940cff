"""A Spark job of ours while it runs: marked, asked whether its tasks run, and cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from pybackend.errors import ClusterError
from pybackend.launchers.spark.slots import is_connect
from pybackend.net.rendezvous import new_token

# How long no task of a job may run: then something else holds the slots, or there are none.
_IDLE_SECONDS = 60.0
_IDLE = (
    "Spark runs no task of this job: other jobs hold the slots, or executors are missing. "
    "Free slots, or use fewer workers"
)


class SparkJob(Protocol):
    """What one thread submits to Spark and another watches; a context manager."""

    def __enter__(self) -> SparkJob: ...

    def __exit__(self, *_: object) -> None: ...

    def thread(self, submit: Callable[[], None]) -> threading.Thread:
        """A thread, not yet started, that calls ``submit``, whose jobs are then these."""

    def cancel(self) -> None:
        """Have Spark end the tasks; to be called again while the job has not ended."""

    def is_busy(self) -> bool:
        """Whether any of its tasks runs; True where Spark does not tell."""


def job_of(session: Any) -> SparkJob:
    """A job of a session, classic or Connect."""
    return ConnectJob(session) if is_connect(session) else ClassicJob(session)


class IdleWatch:
    """Ends the wait for a job of which no task runs: nothing else would."""

    def __init__(self, job: SparkJob) -> None:
        self._job = job
        self._busy = self._looked = time.monotonic()
        self.is_busy = False
        """Whether a task ran when Spark was last asked."""

    def look(self) -> None:
        """Ask Spark, once in a second; `ClusterError` where no task has run for a minute."""
        now = time.monotonic()
        if now < self._looked + 1:
            return
        self._looked = now
        self.is_busy = self._job.is_busy()
        if self.is_busy:
            self._busy = now
        elif now > self._busy + _IDLE_SECONDS:
            raise ClusterError(_IDLE)


class ClassicJob:
    """A job group of the SparkContext in the driver's own JVM."""

    def __init__(self, session: Any) -> None:
        self._context = session.sparkContext
        self._tracker = self._context.statusTracker()
        self.group = _name()

    def __enter__(self) -> ClassicJob:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def thread(self, submit: Callable[[], None]) -> threading.Thread:
        """See `SparkJob`."""
        from pyspark import InheritableThread

        def run() -> None:
            self._context.setJobGroup(self.group, "tfdist training", interruptOnCancel=True)
            submit()

        thread: threading.Thread = InheritableThread(target=run)
        thread.daemon = True
        return thread

    def cancel(self) -> None:
        """See `SparkJob`."""
        self._context.cancelJobGroup(self.group)

    def is_busy(self) -> bool:
        """See `SparkJob`."""
        jobs = self._tracker.getJobIdsForGroup(self.group)
        infos = [self._tracker.getJobInfo(job) for job in jobs]
        stages = [self._tracker.getStageInfo(s) for info in infos if info for s in info.stageIds]
        return any(stage and stage.numActiveTasks for stage in stages)


class ConnectJob:
    """The operations of one thread under a tag of their own, in a Connect session."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._tag = _name()
        self._thread: threading.Thread | None = None
        self._running: int | None = None
        # The session's client has no progress before pyspark 4: then only events tell of tasks.
        self._is_told = hasattr(session, "registerProgressHandler")
        self._reports = self._is_told and _reports_progress(session)

    def __enter__(self) -> ConnectJob:
        if self._is_told:
            self._session.registerProgressHandler(self._progress)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_told:
            self._session.removeProgressHandler(self._progress)

    def thread(self, submit: Callable[[], None]) -> threading.Thread:
        """See `SparkJob`."""

        def run() -> None:
            self._session.addTag(self._tag)
            submit()

        self._thread = threading.Thread(target=run, daemon=True)
        return self._thread

    def cancel(self) -> None:
        """See `SparkJob`."""
        self._session.interruptTag(self._tag)

    def is_busy(self) -> bool:
        """See `SparkJob`."""
        if self._running is not None:
            return self._running > 0
        # While Spark still looks for slots there is no stage, and so no progress either.
        return not self._reports

    def _progress(self, stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
        # It hears of all operations of the session, each on the thread that waits for that one.
        if threading.current_thread() is self._thread:
            self._running = inflight_tasks


def _reports_progress(session: Any) -> bool:
    """Whether the server tells its clients of running tasks: since Spark 4, unless set to 0."""
    try:
        interval = str(session.conf.get("spark.connect.progress.reportInterval"))
    except Exception:  # the server does not know the setting, or does not show it
        return False
    return not interval.startswith(("0", "-"))


def _name() -> str:
    return f"tfdist-{new_token()[:12]}"
