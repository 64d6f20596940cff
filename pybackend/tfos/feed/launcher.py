"""Launcher of workers that hold no Spark slot: a task starts each one and returns immediately."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Emit, Note
from pybackend.core.launchers.base import DataSets, Files, Outcome
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.remote.group import run_group
from pybackend.core.launchers.spark.barrier import driver_addresses, open_meeting
from pybackend.core.launchers.spark.explain import run_explained
from pybackend.core.launchers.spark.preflight import SparkEnvironment, sent_environment
from pybackend.core.launchers.spark.session import (
    driver_python,
    is_connect,
    is_one_machine,
    ship_package,
)
from pybackend.core.launchers.spark.slots import check_slots, cores_of_task, make_profile
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.rendezvous import new_token
from pybackend.core.words import Code, call_of, either, term
from pybackend.tfos.feed.spark_task import StartMember

_LEAVE_SECONDS = 20.0


class DetachedLauncher:
    """Launcher of workers that hold no Spark slot, on the executors of a classic session.

    The tasks that feed a worker need its slot. So the task that starts it returns immediately, and
    the worker outlives it. `launch` blocks; other threads call `close_feeds` in the meantime.
    ``look`` is called repeatedly; a `ClusterError` that it raises stops the workers.
    """

    workers = None
    where = "processes started by Spark tasks"
    is_here = False
    why_fixed = "Spark starts all workers together, in the tasks of one barrier stage"

    def __init__(self, session: Any, look: Callable[[], object] = lambda: None) -> None:
        self.session = session
        self._look = look
        self._meeting: MeetingServer | None = None
        self._lock = threading.Lock()
        self._has_closed = False

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        """Run all workers of a job to completion, without data sets: rows are fed to them."""
        session = self.session
        assert not datasets
        if is_connect(session):
            raise ClusterError(
                "rows cannot be fed to running workers from a Spark Connect session, which has "
                "no RDDs: use a classic session, or "
                f"{call_of(term('barrier_run'), ..., data=Code(either('df', 'data')))}"
            )
        profile = make_profile(session, job.resources, job.workers)
        check_slots(session, job.workers, job.resources)
        ship_package(session)
        token, run = new_token(), partial(run_explained, session, check=self._look)
        addresses = driver_addresses(session)
        with (
            sent_environment(session, job, addresses, run, on_event, profile) as environment,
            open_meeting(session, token, job) as meeting,
        ):
            member = Member(job, files, None, token, meeting.address, is_one_machine(session))
            hosts = self._start(member, profile, environment, on_event)
            with self._lock:
                self._meeting = meeting
                if self._has_closed:
                    meeting.send({})
            try:
                outcome = run_group(meeting, job, hosts, on_event, self._find_failed)
                meeting.drain(_LEAVE_SECONDS)  # the members exit
                return outcome
            finally:
                with self._lock:
                    self._meeting = None

    def close_feeds(self) -> None:
        """Notify all workers that there are no more rows."""
        with self._lock:
            self._has_closed = True
            if self._meeting is not None:
                self._meeting.send({})

    def _start(
        self, member: Member, profile: Any, environment: SparkEnvironment | None, on_event: Emit
    ) -> list[str]:
        """Start all workers as soon as slots are free; return their hosts, by rank."""
        session, workers = self.session, member.job.workers
        cores = cores_of_task(session, workers, member.job.resources.cpus)
        start = StartMember(member, cores, environment)
        numbers = session.sparkContext.parallelize(range(workers), workers)
        if profile:
            numbers = numbers.withResources(profile)

        def submit() -> list[tuple[int, str, str | None]]:
            return list(numbers.barrier().mapPartitions(start).collect())

        with driver_python(session):
            started = sorted(
                run_explained(
                    session, submit, check=self._look, on_wait=lambda text: on_event(Note(text))
                )
            )
        for rank, host, failure in started:
            if failure is not None:
                raise ClusterError(
                    f"worker {rank} on {host} exited before it reached the driver: {failure}"
                )
        return [host for _, host, _ in started]

    def _find_failed(self) -> list[Failure]:
        self._look()
        return []  # a lost worker is detected by its connection
