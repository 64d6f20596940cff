"""Running Spark jobs: mark them, check whether their tasks are running, and cancel them."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from pybackend.core.errors import ClusterError
from pybackend.core.launchers.spark.sessions import ask, is_connect, silence
from pybackend.core.net.authentication import new_token
from pybackend.core.net.liveness import settle

# Longest time without a running task: then other jobs hold the slots, or there are no slots.
_IDLE_SECONDS = 60.0
# Longest time without an answer of Spark's driver; its garbage collection takes seconds.
_SILENT_SECONDS = 60.0
_ASK_EVERY_SECONDS = 1.0
# Interval of the looks at a job, so that Ctrl-C is noticed soon.
_LOOK_SECONDS = 0.05
# Time that a job waits for others before it reports so.
_QUIET_SECONDS = 10.0
# Time between two looks after which this process was suspended, or a user's callback was slow.
_GAP_SECONDS = 5.0
# Time that the caller of a failed job waits for its end.
_CANCEL_SECONDS = 10.0
_IDLE = (
    "Spark is not running any task of this job: other jobs occupy the slots, or executors are "
    "missing or have fewer cores than a worker needs. Free up slots, or use fewer workers"
)
_NOT_SUBMITTED = (
    "Spark's driver did not accept a job: its session was stopped, or its Java process exited. "
    "See the error above, and start a new session"
)
_Value = TypeVar("_Value")


class SparkJob(Protocol):
    """Job that one thread submits to Spark and another one watches; a context manager."""

    session: Any

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, submit: Callable[[], None]) -> threading.Thread:
        """Call ``submit`` on a thread; `ClusterError` if Spark's driver does not answer."""

    def mark(self) -> None:
        """Assign everything that the calling thread submits from now on to this job."""

    def cancel(self) -> None:
        """Cancel the tasks; repeat this until the job has ended."""

    def is_busy(self) -> bool:
        """Return whether a task of the job is running; True if Spark answers without saying so."""

    def find_others(self) -> str:
        """Describe the session's other jobs that are running tasks; empty if Spark shows none."""


def new_job(session: Any) -> SparkJob:
    return ConnectJob(session) if is_connect(session) else ClassicJob(session)


def remember_properties(session: Any) -> Callable[[], None]:
    """Return a function that gives other threads this thread's local properties of Spark.

    They include the scheduler pool. Jobs that such a thread starts get copies of them.
    """
    if is_connect(session):
        return lambda: None
    from pyspark import __version__, inheritable_thread_target

    _reach_driver(session)
    copies_tags = int(__version__.partition(".")[0]) >= 4
    wrap = inheritable_thread_target(session) if copies_tags else inheritable_thread_target
    take: Callable[[], None] = wrap(lambda: None)

    def inherit() -> None:
        _reach_driver(session)
        take()

    return inherit


def _reach_driver(session: Any) -> None:
    # PySpark copies a thread's local properties, such as its scheduler pool, by calls on this
    # thread that have no time limit. So another thread first makes a call. Before a job started, a
    # stopped driver held the call forever (test_a_driver_that_stops_before_a_job_starts_is_named).
    ask(session, "the start of a job", session.sparkContext.statusTracker)


def run_watched(
    session: Any,
    call: Callable[[], _Value],
    check: Callable[[], object] = lambda: None,
    idle_seconds: float | None = None,
    on_wait: Callable[[str], object] | None = None,
) -> _Value:
    """Return the value of a call that runs a Spark job, without limiting the job's duration.

    ``check`` is called repeatedly on this thread while the job runs, and must return soon. If it
    raises an error, the job is cancelled. ``idle_seconds`` is the most seconds without a running
    task; None: a minute. With ``on_wait``, time during which tasks of the session's other jobs are
    running does not count as idle. If the wait is long, it is called once, with a description of
    those jobs. `ClusterError` if no task ran for that long, or Spark's driver did not answer for a
    minute. Errors raised by the call are passed on.
    """
    with running(session, call, idle_seconds, on_wait) as one:
        while not one.is_over:
            check()
            one.wait(_LOOK_SECONDS)
            one.watch.look()
        return one.result()


@contextmanager
def running(
    session: Any,
    call: Callable[[], _Value],
    idle_seconds: float | None = None,
    on_wait: Callable[[str], object] | None = None,
) -> Iterator[RunningCall[_Value]]:
    """Run a call on a thread, as `run_watched` does; on exit, cancel its job if it still runs."""
    outcome: Future[_Value] = Future()

    def submit() -> _Value:
        job.mark()
        return call()

    with new_job(session) as job:
        thread = job.start(partial(settle, outcome, submit))
        one = RunningCall(outcome, thread, IdleWatch(job, idle_seconds, on_wait))
        try:
            yield one
        finally:
            if not one.is_over:
                start_cancel(job, outcome)
                thread.join(timeout=_CANCEL_SECONDS)


@dataclass(frozen=True)
class RunningCall(Generic[_Value]):
    """Call of `running`, and the watch over its Spark job."""

    outcome: Future[_Value]
    thread: threading.Thread
    watch: IdleWatch

    @property
    def is_over(self) -> bool:
        """True if the call has ended: PySpark's part of the thread may run on, or fail."""
        return self.outcome.done() or not self.thread.is_alive()

    def wait(self, seconds: float) -> None:
        wait([self.outcome], timeout=seconds)

    def result(self) -> _Value:
        if not self.outcome.done():  # PySpark's part of the thread failed; its hook printed why
            raise ClusterError(_NOT_SUBMITTED)
        return self.outcome.result()


def give_up_after(seconds: float, late: Exception) -> Callable[[], None]:
    """Return a ``check`` for `run_watched` that raises ``late`` after some seconds."""
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise late

    return check


def start_cancel(job: SparkJob, outcome: Future[Any]) -> None:
    """Cancel a job until its outcome is known, without waiting for that."""

    def cancel() -> None:
        # Repeatedly: a job that is just being submitted cannot be cancelled yet.
        for _ in range(10):
            with suppress(Exception):  # the session may have stopped, which ends the job too
                job.cancel()
            if wait([outcome], timeout=1).done:
                return

    # Not on this thread: the client of a stopped Connect server waits for minutes.
    threading.Thread(target=cancel, daemon=True).start()


class IdleWatch:
    """Watch for a job that has no running tasks, or whose driver does not answer.

    ``idle_seconds`` and ``on_wait`` are as in `run_watched`.
    """

    def __init__(
        self,
        job: SparkJob,
        idle_seconds: float | None = None,
        on_wait: Callable[[str], object] | None = None,
    ) -> None:
        self._job, self._on_wait = job, on_wait
        self._waits_since: float | None = None
        self._idle_seconds = _IDLE_SECONDS if idle_seconds is None else idle_seconds
        # Times of the last look, running task, question and answer.
        self._looked = self._busy = self._asked = self._heard = time.monotonic()
        self._answer: queue.Queue[tuple[bool, str]] = queue.Queue()
        self._is_waiting = self._has_said = False
        self.is_busy = False
        """True if a task was running when Spark last answered."""

    def look(self) -> None:
        """Query Spark once a second, without waiting for the answer.

        `ClusterError` if no task ran for ``idle_seconds``, or Spark did not answer for a minute.
        """
        now = time.monotonic()
        self._skip_gap(now)
        self._take_answer(now)
        if not self._is_waiting and now >= self._asked + _ASK_EVERY_SECONDS:
            self._asked, self._is_waiting = now, True
            threading.Thread(target=self._ask, daemon=True).start()
        if self._is_waiting and now > max(self._heard, self._asked) + _SILENT_SECONDS:
            raise silence(self._job.session, "the state of a job", _SILENT_SECONDS)
        if not self._is_waiting and now > self._busy + self._idle_seconds:
            raise ClusterError(_IDLE)

    def _skip_gap(self, now: float) -> None:
        """Exclude time during which `look` was not called: Spark did not cause that delay."""
        # After a laptop had slept, the driver counted as lost
        # (test_a_watcher_that_was_suspended_does_not_blame_spark).
        gap, self._looked = now - self._looked, now
        if gap > _GAP_SECONDS:
            self._busy, self._asked = self._busy + gap, self._asked + gap
            self._heard += gap

    def _take_answer(self, now: float) -> None:
        with suppress(queue.Empty):
            self.is_busy, others = self._answer.get_nowait()
            self._is_waiting, self._heard = False, now
            if self.is_busy or others:
                self._busy = now
            if self.is_busy or not others:
                self._waits_since = None
            elif self._waits_since is None:
                self._waits_since = now
            elif self._on_wait and not self._has_said and now > self._waits_since + _QUIET_SECONDS:
                self._has_said = True
                self._on_wait(
                    f"a job is waiting for slots: other jobs of the session are running ({others})"
                )

    def _ask(self) -> None:
        # An error does not count as an answer; the job's thread gets a similar one and raises it.
        # Counts attempts, not seconds: a suspended process makes no attempts.
        for _ in range(math.ceil(_SILENT_SECONDS / _ASK_EVERY_SECONDS)):
            with suppress(Exception):
                is_busy = self._job.is_busy()
                waits = self._on_wait is not None and not is_busy
                self._answer.put((is_busy, self._job.find_others() if waits else ""))
                return
            time.sleep(_ASK_EVERY_SECONDS)


class ClassicJob(SparkJob):
    """Job group of the SparkContext in the driver's JVM."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self._context = session.sparkContext
        self._tracker = ask(session, "the state of jobs", self._context.statusTracker)
        self.group = _name()

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, submit: Callable[[], None]) -> threading.Thread:
        from pyspark import InheritableThread

        _reach_driver(self.session)
        thread: threading.Thread = InheritableThread(target=submit)
        thread.daemon = True
        thread.start()
        return thread

    def mark(self) -> None:
        self._context.setJobGroup(self.group, "tfdist training", interruptOnCancel=True)

    def cancel(self) -> None:
        ask(self.session, "the end of a job", lambda: self._context.cancelJobGroup(self.group))

    def is_busy(self) -> bool:
        return any(map(self._find_busy_stage, self._tracker.getJobIdsForGroup(self.group)))

    def find_others(self) -> str:
        own = self._tracker.getJobIdsForGroup(self.group)
        others = [job for job in self._tracker.getActiveJobsIds() if job not in own]
        stages = {job: self._find_busy_stage(job) for job in others}
        return ", ".join(f"job {job}: {stage}" for job, stage in stages.items() if stage)

    def _find_busy_stage(self, job: int) -> str | None:
        info = self._tracker.getJobInfo(job)
        stages = [self._tracker.getStageInfo(stage) for stage in (info.stageIds if info else ())]
        return next((s.name or "a stage" for s in stages if s and s.numActiveTasks), None)


class ConnectJob(SparkJob):
    """Operations of one thread in a Connect session, marked by a tag."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self._tag = _name()
        self._thread: threading.Thread | None = None
        self._running: int | None = None
        self._others: dict[Any, int] = {}
        # Before pyspark 4, the session's client has no progress: only events show running tasks.
        self._has_progress = hasattr(session, "registerProgressHandler")
        self._reports = self._has_progress and _reports_progress(session)

    def __enter__(self) -> Self:
        if self._has_progress:
            self.session.registerProgressHandler(self._progress)
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_progress:
            self.session.removeProgressHandler(self._progress)

    def start(self, submit: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=submit, daemon=True)
        thread.start()
        return thread

    def mark(self) -> None:
        self._thread = threading.current_thread()
        self.session.addTag(self._tag)

    def cancel(self) -> None:
        ask(self.session, "the end of a job", lambda: self.session.interruptTag(self._tag))

    def is_busy(self) -> bool:
        """Return whether a task is running; True if the server does not report running tasks."""
        # Progress is pushed, and stops with the server: this call shows that the server runs.
        self.session.conf.get("spark.sql.shuffle.partitions")
        if self._running is not None:
            return self._running > 0
        # While Spark waits for slots there is no stage, and therefore no progress.
        return not self._reports

    def find_others(self) -> str:
        """Describe other calls of this session; jobs of the server's other clients are unknown."""
        count = sum(self._others.copy().values())
        return f"{count} tasks of this session's other calls" if count else ""

    def _progress(self, stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
        # Called for all operations of the session, each on the thread that waits for it.
        if threading.current_thread() is self._thread:
            self._running = inflight_tasks
        elif done:
            self._others.pop(operation_id, None)
        else:
            self._others[operation_id] = inflight_tasks


def _reports_progress(session: Any) -> bool:
    """Return whether the server reports running tasks: since Spark 4, unless that is set to 0."""
    name = "spark.connect.progress.reportInterval"
    try:
        interval = str(ask(session, f"the setting {name}", lambda: session.conf.get(name)))
    except ClusterError:
        raise
    except Exception:  # the server does not have the setting, or hides it
        return False
    return not interval.startswith(("0", "-"))


def _name() -> str:
    return f"tfdist-{new_token()[:12]}"
