"""Code for the Spark task of one elastic worker, which receives all rows.

This file is imported on the executors; the driver sends it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pybackend.job.messages import Failed
from pybackend.job.notice import Notice
from pybackend.launchers.member import check_allotted, choose_variables
from pybackend.launchers.remote.elastic_task import Post, follow_orders
from pybackend.launchers.remote.task import RemoteGroup, RemoteTask, describe_failure
from pybackend.launchers.spark.barrier_task import (
    BarrierGroup,
    Task,
    keeping_fork_server_of_executor,
)
from pybackend.machine.identity import own_address
from pybackend.net.heartbeat import find_silence
from pybackend.net.meeting_client import MeetingClient
from pybackend.net.rendezvous import split_address

_DRIVER_SECONDS = 30.0
_LOST_DRIVER = "lost the connection to the driver"


@dataclass(frozen=True)
class ElasticTask:
    """Function that Spark runs on a single partition, in a barrier stage of one task.

    Spark never attempts this stage again, not even after it has lost the executor: a barrier stage
    that returns a job's result fails its job, because Spark may have delivered part of the result.
    (Other barrier stages are resubmitted.) The driver starts another worker instead, with a number
    of its own. A second attempt could not join: the driver accepts a single connection per worker.

    Attributes
    ----------
    task
        What all workers have in common, and the address of the driver.
    post
        Settings of this worker.
    """

    task: Task
    post: Post

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Run the worker; yield nothing, because it reports to the driver."""
        from pyspark import BarrierTaskContext

        member, environment = self.task.member, self.task.environment
        driver = member.driver or ""
        with MeetingClient(driver, member.token, 0, _DRIVER_SECONDS) as meeting:
            meeting.require()
            meeting.start_beating(find_silence(member.job.timeout))
            place = BarrierGroup(BarrierTaskContext.get(), meeting, self.task.cores)
            arguments = self.post.number, place.hosts, place.cores, place.gpus, meeting
            group = RemoteGroup(*arguments)
            try:
                if environment is not None:
                    member = replace(member, interpreter=environment.install())
                check_allotted(group, member.job.resources)
            except Exception as error:  # such as a full disk
                meeting(Failed(describe_failure(0, place.hosts[0], error)))
                return
            with keeping_fork_server_of_executor(member.job, place):
                follow_orders(
                    RemoteTask(member, tuple(place.hosts)),
                    self.post,
                    batches,
                    meeting,
                    choose_variables(group, member.job.resources),
                    own_address(split_address(driver)[0]),
                    Notice(),
                    lambda: _LOST_DRIVER if meeting.has_ended else None,
                )
        yield from ()
