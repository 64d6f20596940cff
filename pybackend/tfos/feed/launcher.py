"""Workers of a cluster, for the driver: their launch in a thread, and that of fed workers.

A fed worker holds no Spark slot: the task that starts it returns immediately.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pybackend.core.api.display import printer
from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Announced, Event, Note
from pybackend.core.launchers.base import Files, Outcome
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.remote.group import run_group
from pybackend.core.launchers.spark.explain import run_explained
from pybackend.core.launchers.spark.sessions import (
    driver_python,
    is_connect,
    is_one_machine,
    ship_package,
)
from pybackend.core.launchers.spark.slots import check_slots, cores_of_task, make_profile
from pybackend.core.launchers.spark.stage import driver_addresses, open_meeting, sent_environment
from pybackend.core.net.authentication import new_token
from pybackend.core.words import Code, call_of, either, term
from pybackend.tfos import TFSparkNode
from pybackend.tfos.feed.client import Feeder
from pybackend.tfos.feed.dialog import FEED
from pybackend.tfos.feed.spark_task import StartMember

_LEAVE_SECONDS = 20.0
_LOOK_SECONDS = 0.05
# Longest time for workers to end.
_END_SECONDS = 60.0


def launch_fed(session: Any, cluster: LaunchedCluster, job: Job, files: Files) -> Outcome:
    """Run all workers of a job to completion; they hold no Spark slot, and rows are fed to them.

    The tasks that feed a worker need its slot. So the task that starts it returns immediately, and
    the worker outlives it. `cluster.look` is called repeatedly; a `ClusterError` that it raises
    stops the workers.
    """
    if is_connect(session):
        raise ClusterError(
            "rows cannot be fed to running workers from a Spark Connect session, which has "
            "no RDDs: use a classic session, or "
            f"{call_of(term('barrier_run'), ..., data=Code(either('df', 'data')))}"
        )
    profile = make_profile(session, job.resources, job.workers)
    check_slots(session, job.workers, job.resources)
    ship_package(session)
    token, run = new_token(), partial(run_explained, session, check=cluster.look)
    addresses = driver_addresses(session)
    with (
        sent_environment(session, job, addresses, run, cluster.hear, profile) as environment,
        open_meeting(session, token, job) as meeting,
    ):
        member = Member(job, files, None, token, meeting.address, is_one_machine(session))
        cores = cores_of_task(session, job.workers, job.resources.cpus)
        start = StartMember(member, cores, environment)
        numbers = session.sparkContext.parallelize(range(job.workers), job.workers)
        if profile:
            numbers = numbers.withResources(profile)

        def submit() -> list[tuple[int, str, str | None]]:
            return list(numbers.barrier().mapPartitions(start).collect())

        # The tasks start as soon as slots are free.
        with driver_python(session):
            started = sorted(run(submit, on_wait=lambda text: cluster.hear(Note(text))))
        for rank, host, failure in started:
            if failure is not None:
                raise ClusterError(
                    f"worker {rank} on {host} exited before it reached the driver: {failure}"
                )

        def look() -> list[Failure]:
            cluster.look()
            if cluster.closing.is_set():
                cluster.closing.clear()
                meeting.send({})
            return []  # a lost worker is detected by its connection

        hosts = [host for _, host, _ in started]
        outcome = run_group(meeting, job, hosts, cluster.hear, look)
        meeting.drain(_LEAVE_SECONDS)  # the members exit
        return outcome


class NobodyTakesRows(Exception):
    """All functions have returned or want no more rows, so that the feeding tasks can stop."""


class LaunchedCluster:
    """Workers of a cluster, launched by a separate thread.

    The thread calls ``launch``. ``nodes`` are the descriptions of the nodes, by executor id.
    ``closing`` is set when there are no more rows.
    """

    def __init__(self, workers: int) -> None:
        self.token = new_token()
        self.closing = threading.Event()
        self.launch: Callable[[], object] = lambda: None
        self.nodes: list[dict[str, Any]] = []
        self._satisfied: set[int] = set()
        self._left: set[int] = set()
        self._reason: str | None = None
        self._workers = workers
        self._show = printer(2)
        self._error: BaseException | None = None
        self._fed: dict[int, str] = {}
        self._known: dict[int, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def done(self) -> bool:
        """True if a function does not want any more rows."""
        return bool(self._satisfied)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def start(self, is_fed: bool, seconds: float) -> None:
        """Start the workers, and wait until all functions are about to start."""
        self._thread.start()
        deadline = time.monotonic() + seconds
        try:
            while len(self._known) < self._workers or (is_fed and len(self._fed) < self._workers):
                self._thread.join(_LOOK_SECONDS)
                if self.has_ended:
                    self.raise_failure(0)
                    break
                if time.monotonic() > deadline:
                    missing = [str(n) for n in range(self._workers) if n not in self._known]
                    self._end(
                        f"worker {', '.join(missing)} did not start within {seconds:g} s "
                        "(reservation_timeout): see the logs of the executors"
                    )
        except BaseException as error:
            self.give_up(f"the start was interrupted by {type(error).__name__}")
            raise
        self.nodes = sorted(self._known.values(), key=lambda node: int(node["executor_id"]))

    def feeder(self, timeout: float) -> Feeder:
        return Feeder({rank: self._fed[rank] for rank in self._takers()}, self.token, timeout)

    def watch(self) -> None:
        """Raise the workers' failure, or `NobodyTakesRows`, to stop the feeding tasks."""
        self.raise_failure(_LOOK_SECONDS)
        if self.has_ended or self._satisfied.issuperset(self._takers()):
            raise NobodyTakesRows

    def _takers(self) -> list[int]:
        """Return the ranks that take rows."""
        return sorted(rank for rank, node in self._known.items() if node["job_name"] != "ps")

    def raise_failure(self, seconds: float) -> None:
        """Raise the workers' failure if it occurs within some seconds."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error

    def finish(self, deadline: float, timeout: float) -> None:
        self.closing.set()
        while not self.has_ended:  # a short wait, so that Ctrl-C is noticed
            self._thread.join(_LOOK_SECONDS)
            if time.monotonic() > deadline:
                self._end(
                    f"the workers were stopped because they were still running after {timeout:g} "
                    "s (timeout): their functions did not return, although there were no more rows"
                )
        self.raise_failure(0)

    def stop(self) -> None:
        """Do nothing: the workers end with their functions, or with this process."""

    def look(self) -> None:
        if self._reason is not None:
            raise ClusterError(self._reason)

    def _run(self) -> None:
        try:
            self.launch()
        except BaseException as error:
            self._error = error

    def hear(self, event: Event) -> None:
        if not isinstance(event, Announced):
            self._show(event)
        elif event.name == FEED:
            self._fed[event.rank] = event.text
        elif event.name == TFSparkNode.NODE:
            self._known[event.rank] = json.loads(event.text)
        elif event.name == TFSparkNode.TERMINATED:
            self._satisfied.add(event.rank)
            if event.text == TFSparkNode.LEFT:
                self._left.add(event.rank)

    def tell_left(self) -> None:
        """Show the user, once, which functions returned while rows were fed."""
        left, self._left = sorted(self._left.intersection(self._takers())), set()
        if left:
            early = f"worker {', '.join(map(str, left))} returned before the rows ended"
            advice = "If that is intended, call DataFeed.terminate() in the function"
            self._show(Note(f"{early}: some rows may not have been used. {advice}"))

    def _end(self, reason: str) -> None:
        self.give_up(reason)
        raise self._error or ClusterError(reason)

    def give_up(self, reason: str) -> None:
        """Stop the workers that are still running, and wait some time for them to exit."""
        self._reason = self._reason or reason
        self._thread.join(_END_SECONDS)
