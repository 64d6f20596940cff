"""Code for each task of the barrier stage: one worker, which receives the task's rows.

This file is imported on the executors; the driver sends it there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.data.arrow import TensorReader
from pybackend.data.columns import ColumnGroup
from pybackend.data.row_store import Layout, RowStoreWriter, store_blobs
from pybackend.errors import ClusterError
from pybackend.job.codec import encode
from pybackend.job.job import Job, TrainingJob
from pybackend.job.messages import Failed
from pybackend.job.report import WorkerReport
from pybackend.launchers.fork_server import keeping_fork_server
from pybackend.launchers.member import Member
from pybackend.launchers.remote.task import (
    MODEL,
    Post,
    RemoteTask,
    describe_failure,
    take_part,
)
from pybackend.launchers.spark.environment_task import SparkEnvironment
from pybackend.launchers.spark.task_failure import fail_task
from pybackend.machine.identity import own_address
from pybackend.machine.processes import name_process
from pybackend.net.heartbeat import find_silence
from pybackend.net.meeting_client import MeetingClient
from pybackend.net.rendezvous import split_address
from pybackend.words import setting, term

SCHEMA = "rank int, report string, model_format string, model binary"
# Marks the data set of a row when training and validation rows travel together.
SET_COLUMN = "__tfdist_set__"
_PIECE_BYTES = 8 << 20
NO_OBSERVING = (
    "observers need connections from Spark's workers to the driver, and at least one worker "
    "cannot reach it. Set spark.driver.host to the address at which executors can reach the "
    "driver, and spark.driver.bindAddress to the address to listen on; or leave the observers out"
)
# A driver that does not answer by then is unreachable: the tasks meet by Spark's allGather.
_DRIVER_SECONDS = 3.0
# ... unless the driver needs rank 0's messages: a busy machine may take longer to answer.
_WANTED_DRIVER_SECONDS = 30.0
_LOST_DRIVER = "lost the connection to the driver"


class BarrierGroup:
    """The tasks of a barrier stage, which rendezvous at the driver if all of them reach it."""

    def __init__(
        self, context: Any, meeting: MeetingClient, cores: int, needs_driver: bool = False
    ) -> None:
        self._needs_driver = needs_driver
        self._context = context
        self._meeting = meeting
        self.rank: int = context.partitionId()
        addresses = [str(info.address) for info in context.getTaskInfos()]
        self.hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
        # An address names an executor, by its host and port.
        host = addresses[self.rank].rpartition(":")[0]
        self.executors_here = len({a for a in addresses if a.rpartition(":")[0] == host})
        self.cores = max(int(context.cpus()), cores)
        gpus = context.resources().get("gpu")
        self.gpus = None if gpus is None else list(gpus.addresses)

    def gather(self, message: str) -> list[str]:
        """Return the messages of all tasks by rank."""
        everyone = self._meeting.gather(message)
        if everyone is None and self._needs_driver:
            raise ClusterError(NO_OBSERVING)
        if everyone is None:  # costs a second
            everyone = list(self._context.allGather(message))
        return everyone


def keeping_fork_server_of_executor(
    job: Job, group: BarrierGroup
) -> AbstractContextManager[object]:
    """Fork the workers of this block from the executor's server, if the job wants one."""
    # Spark's daemon, or the executor itself, starts the Python processes of tasks.
    parent = os.getppid()
    if not job.resources.fork_server or job.kind == "run" or parent == 1:
        return nullcontext()
    try:
        return keeping_fork_server(group.executors_here, name_process(parent))
    except OSError:  # it has ended, or this is not Linux
        return nullcontext()


@dataclass(frozen=True)
class Task:
    """Function that Spark runs on each partition.

    ``cores`` is the number for each worker, unless Spark gives the task more. ``environment`` is
    the one of the workers; None: the executor's.
    """

    member: Member
    cores: int = 1
    environment: SparkEnvironment | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Run one worker; yield rows of `SCHEMA`, or raise, so that Spark stops the others."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        member, rank = self.member, context.partitionId()
        tasks = len(context.getTaskInfos())
        if tasks != member.job.workers:
            raise RuntimeError(
                f"{setting(repartition=False)}, but the {term('DataFrame')} has {tasks} "
                f"partitions, not {setting(workers=member.job.workers)}"
            )
        is_observed = member.job.is_observed
        writes_events = isinstance(member.job, TrainingJob) and member.job.tensorboard is not None
        is_wanted = is_observed or writes_events
        patience = _WANTED_DRIVER_SECONDS if is_wanted else _DRIVER_SECONDS
        with MeetingClient(member.driver, member.token, rank, patience) as meeting:
            meeting.start_beating(find_silence(member.job.timeout))

            def give_up() -> str | None:
                if is_observed and meeting.has_ended:
                    return f"{_LOST_DRIVER}, which monitors the training"
                return None

            group = BarrierGroup(context, meeting, self.cores, is_observed)
            if self.environment is not None:
                try:
                    member = replace(member, interpreter=self.environment.install())
                except Exception as error:
                    host = group.hosts[rank]
                    fail_task(describe_failure(rank, host, error), meeting)
            with keeping_fork_server_of_executor(member.job, group):
                report, model = member.work(
                    group, batches, meeting, give_up=give_up, orders=meeting.poll_order
                )
            if report.failure is not None:
                fail_task(report.failure, meeting)
            rows = list(rows_to_return(report, None if has_sent(meeting, model) else model))
        yield from rows


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
        with MeetingClient(driver, member.token, 0, _WANTED_DRIVER_SECONDS) as meeting:
            meeting.require()
            meeting.start_beating(find_silence(member.job.timeout))
            place = BarrierGroup(BarrierTaskContext.get(), meeting, self.task.cores)
            try:
                if environment is not None:
                    member = replace(member, interpreter=environment.install())
            except Exception as error:  # such as a full disk
                meeting(Failed(describe_failure(0, place.hosts[0], error)))
                return
            with keeping_fork_server_of_executor(member.job, place):
                take_part(
                    RemoteTask(member, tuple(place.hosts)),
                    0,
                    batches,
                    meeting,
                    place.cores,
                    place.gpus,
                    own_address(split_address(driver)[0]),
                    post=self.post,
                    give_up=lambda: _LOST_DRIVER if meeting.has_ended else None,
                )
        yield from ()


@dataclass(frozen=True)
class RowsOfFrame:
    """Input rows of one `DataFrameRows`, or of several, which `SET_COLUMN` distinguishes.

    ``column_groups`` are the tensors made from them, by data set.
    """

    column_groups: Mapping[str, tuple[ColumnGroup, ...]]

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        """Write this worker's rows as they arrive, into one folder per data set."""
        with ExitStack() as stack:
            writers = [
                stack.enter_context(RowStoreWriter(folder / name)) for name in self.column_groups
            ]
            readers = [TensorReader(column_groups) for column_groups in self.column_groups.values()]
            for batch in batches:
                for number, part in self._by_set(batch):
                    if part.num_rows:
                        writers[number].append(readers[number].read(part))

    def _by_set(self, batch: Any) -> Iterator[tuple[int, Any]]:
        if len(self.column_groups) == 1:
            yield 0, batch
            return
        of_set = batch.column(batch.num_columns - 1).to_numpy(zero_copy_only=False)
        for number in range(len(self.column_groups)):
            yield number, batch.take(np.flatnonzero(of_set == number))


@dataclass(frozen=True)
class Blobs:
    """Input arrays from the driver, in the layout of `pybackend.data.row_store`.

    ``sent`` is the number of rows for each rank.
    """

    layout: Layout
    sent: Mapping[str, list[int]]

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        """Write this worker's rows into one folder per data set."""
        store_blobs(batches, self.layout, self.sent, rank, folder)


def has_sent(meeting: MeetingClient, model: tuple[str, bytes] | None) -> bool:
    """Send the model to the driver, at a third of the cost of rows; return whether it was sent."""
    if model is None or meeting.error is not None or meeting.has_ended:
        return False
    try:
        meeting.send(MODEL + model[0], model[1])
    except ClusterError:  # the connection failed, but Spark's may not
        return False
    return True


def rows_to_return(report: WorkerReport, model: tuple[str, bytes] | None) -> Iterator[Any]:
    """Yield the report, and the model in pieces, because Spark copies each row several times."""
    kind, content = model or (None, b"")
    yield _row(report.rank, encode(report), kind, None)
    for first in range(0, len(content), _PIECE_BYTES):
        yield _row(report.rank, None, kind, content[first : first + _PIECE_BYTES])


def _row(rank: int, report: str | None, kind: str | None, piece: bytes | None) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays(
        [
            pa.array([rank], pa.int32()),
            pa.array([report], pa.string()),
            pa.array([kind], pa.string()),
            pa.array([piece], pa.binary()),
        ],
        names=["rank", "report", "model_format", "model"],
    )
