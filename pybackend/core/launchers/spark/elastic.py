"""Workers of elastic training on Spark: each one is a Spark job with a single task.

All tasks of a barrier stage end when one of them fails. So that the others continue, each worker
has its own stage of one task. A worker that waits for a slot is a job in Spark's queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.messages import Emit, Event, Standby
from pybackend.core.launchers.base import Outcome
from pybackend.core.launchers.remote.group import Follow, Start, Way, run_group
from pybackend.core.launchers.remote.task import REPORT, Post
from pybackend.core.launchers.spark.barrier_task import (
    SCHEMA,
    UNKNOWN_HOST,
    ElasticTask,
    Task,
    find_failures,
)
from pybackend.core.launchers.spark.explain import explain_spark_error
from pybackend.core.launchers.spark.jobs import RunningCall, running
from pybackend.core.launchers.spark.session import ask
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.rendezvous import split_address

# For a task to end when its worker has reported.
_END_SECONDS = 10.0


@dataclass(frozen=True)
class TaskWay(Way):
    """A `Way` that runs a Spark job for each worker.

    Attributes
    ----------
    frame
        DataFrame with all rows in one partition.
    task
        What all workers have in common.
    stage_options
        Further arguments of ``mapInArrow``.
    make_meeting
        Returns a server for one worker.
    explain_no_task
        Returns the error for a Spark job that ended without a task.
    compares_rows
        As in `Post`.
    inherit
        Called on each worker's thread: gives it the caller's local properties of Spark.
    """

    session: Any
    frame: Any
    task: Task
    stage_options: Mapping[str, Any]
    make_meeting: Callable[[], MeetingServer]
    explain_no_task: Callable[[], Exception]
    compares_rows: bool
    inherit: Callable[[], None]
    _hosts: dict[int, list[str]] = field(default_factory=dict)
    _receiving: set[int] = field(default_factory=set)

    def name_host(self, number: int, place: int) -> str:
        return self._hosts.get(number, [UNKNOWN_HOST])[0]

    def listen(self, workers: int) -> MeetingServer:
        return self.make_meeting()

    @contextmanager
    def open(self, start: Start) -> Iterator[Follow]:
        number, meeting = start.number, start.meeting
        assert number is not None
        self.inherit()
        plan = self._plan(number, meeting)
        host = self._hosts[number] = [UNKNOWN_HOST]
        # The first ones need a slot now; the others may wait until one is free.
        idle_seconds = None if number < self.task.member.job.workers else math.inf
        with running(self.session, plan.collect, idle_seconds) as task:

            def look() -> list[Failure]:
                # Behind a worker that is receiving rows, the time without a task does not count:
                # the others were given up after a minute
                # (test_a_worker_waits_for_a_slot_while_another_receives_its_rows).
                if task.is_busy or not self._receiving - {number}:
                    task.look()
                if task.is_busy and host[0] == UNKNOWN_HOST:
                    self._receiving.add(number)
                else:
                    self._receiving.discard(number)
                return self._find_failures(task, meeting, host[0]) if task.is_over else []

            def follow(on_event: Emit) -> Outcome:
                def hear(event: Event) -> object:
                    if isinstance(event, Standby):
                        host[0] = split_address(event.address)[0]
                    return on_event(event)

                return run_group(meeting, start.job, host, hear, look, math.inf)

            try:
                yield follow
            finally:
                self._receiving.discard(number)
            if meeting.result(0, REPORT) is not None:
                task.wait(_END_SECONDS)

    def _plan(self, number: int, meeting: MeetingServer) -> Any:
        """Return the DataFrame whose job runs a worker."""
        member = replace(self.task.member, driver=meeting.address)
        post = Post(number, compares_rows=self.compares_rows)
        own = ElasticTask(replace(self.task, member=member), post)
        size = sum(map(len, member.files.values()))
        options = {"barrier": True, **self.stage_options}
        return ask(
            self.session, "a plan", lambda: self.frame.mapInArrow(own, SCHEMA, **options), size
        )

    def _find_failures(
        self, task: RunningCall[Any], meeting: MeetingServer, host: str
    ) -> list[Failure]:
        """Return why a Spark job has ended; what its worker has sent takes precedence."""
        try:
            task.result()
        except ClusterError:
            raise
        except Exception as error:
            if found := find_failures(str(error)):
                is_known = host != UNKNOWN_HOST
                return [replace(one, host=host) if is_known else one for one in found]
            raise explain_spark_error(error, self.session) from None
        if not meeting.has_come(0):
            raise self.explain_no_task()
        return []
