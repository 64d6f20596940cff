"""What runs in each task of the barrier stage: a member of the gang, fed with the task's rows.

This file is imported on the executors; the driver sends it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.data.arrow import TensorReader
from pybackend.data.columns import ColumnGroup
from pybackend.data.packed import Layout, spool_blobs
from pybackend.data.spool import SpoolWriter
from pybackend.errors import ClusterError
from pybackend.job.codec import encode
from pybackend.job.job import TrainingJob
from pybackend.job.report import WorkerReport
from pybackend.launchers.member import Member
from pybackend.launchers.spark.task_failure import fail_task
from pybackend.net.heartbeat import find_silence
from pybackend.net.meeting_client import MeetingClient

SCHEMA = "rank int, report string, model_format string, model binary"
# Marks which data set a row belongs to when training and validation rows travel together.
SET_COLUMN = "__tfdist_set__"
_PIECE_BYTES = 8 << 20
NO_OBSERVING = (
    "observers need connections from Spark's workers to the driver, and at least one worker cannot "
    "reach it. Set spark.driver.host to the address by which executors reach the driver, and "
    "spark.driver.bindAddress to the one to listen on; or leave the observers out"
)
# A driver that does not answer by then is out of reach: the tasks meet by Spark's own allGather.
_DRIVER_SECONDS = 3.0
# ... unless what rank 0 sends is wanted there: a busy machine may take longer to answer.
_WANTED_DRIVER_SECONDS = 30.0


class BarrierGroup:
    """A gang as Spark's barrier knows it, which meets at the driver if all members reach it."""

    def __init__(
        self, context: Any, meeting: MeetingClient, cores: int, needs_driver: bool = False
    ) -> None:
        self._needs_driver = needs_driver
        self._context = context
        self._meeting = meeting
        self.rank: int = context.partitionId()
        addresses = [str(info.address) for info in context.getTaskInfos()]
        self.hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
        self.cores = max(int(context.cpus()), cores)
        gpus = context.resources().get("gpu")
        self.gpus = None if gpus is None else list(gpus.addresses)

    def gather(self, message: str) -> list[str]:
        """See `Group`."""
        everyone = self._meeting.gather(message)
        if everyone is None and self._needs_driver:
            raise ClusterError(NO_OBSERVING)
        if everyone is None:  # costs a second
            everyone = list(self._context.allGather(message))
        return everyone


@dataclass(frozen=True)
class Task:
    """The function that Spark runs on each partition.

    ``cores`` are those of each worker, if Spark does not give its task more.
    """

    member: Member
    cores: int = 1

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Run one worker; yields rows of `SCHEMA`, or raises so that Spark ends the others."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        member, rank = self.member, context.partitionId()
        tasks = len(context.getTaskInfos())
        if tasks != member.job.workers:
            raise RuntimeError(
                f"repartition=False, but the DataFrame has {tasks} partitions, not workers="
                f"{member.job.workers}"
            )
        is_observed = member.job.is_observed
        writes_events = isinstance(member.job, TrainingJob) and member.job.tensorboard is not None
        is_wanted = is_observed or writes_events
        patience = _WANTED_DRIVER_SECONDS if is_wanted else _DRIVER_SECONDS
        with MeetingClient(member.driver, member.token, rank, patience) as meeting:
            meeting.start_beating(find_silence(member.job.timeout))

            def give_up() -> str | None:
                is_lost = is_observed and meeting.has_ended
                return "the driver, which observes the training, was lost" if is_lost else None

            group = BarrierGroup(context, meeting, self.cores, is_observed)
            report, model = member.work(
                group, batches, meeting, give_up=give_up, orders=meeting.poll_order
            )
            if report.failure is not None:
                fail_task(report.failure, meeting)
        yield from rows_to_return(report, model)


@dataclass(frozen=True)
class RowsOfFrame:
    """The input is rows of one `DataFrameRows`, or of several, which `SET_COLUMN` tells apart.

    ``column_groups`` are the tensors that they become, by data set.
    """

    column_groups: Mapping[str, tuple[ColumnGroup, ...]]

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        """Write this worker's rows as they come, a folder for each data set."""
        with ExitStack() as stack:
            writers = [
                stack.enter_context(SpoolWriter(folder / name)) for name in self.column_groups
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
    """The input is arrays of the driver, as `pybackend.data.packed` lays them out.

    ``sent`` rows reach each rank.
    """

    layout: Layout
    sent: Mapping[str, list[int]]

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        """Write this worker's rows, a folder for each data set."""
        spool_blobs(batches, self.layout, self.sent, rank, folder)


def rows_to_return(report: WorkerReport, model: tuple[str, bytes] | None) -> Iterator[Any]:
    """The report, and the model in pieces: a row is copied several times on its way."""
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
