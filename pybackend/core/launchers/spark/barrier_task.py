"""Code for each task of a barrier stage: one worker, which receives the task's rows.

This file is imported on the executors; the driver sends it there. In a stage that sparklyr runs, R
on an executor calls `run_from_r` in a process, which starts R. The first R belongs to sparklyr, and
passes on the rank and the addresses. The second R is the worker: R with Python and TensorFlow
embedded, started and watched like every other worker.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import cloudpickle
import numpy as np

from pybackend.core.data.arrow import TensorReader
from pybackend.core.data.columns import ColumnGroup
from pybackend.core.data.row_store import Layout, RowStoreWriter, store_blobs
from pybackend.core.data.text import decode_lines
from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import Job, TrainingJob
from pybackend.core.job.messages import Emit, Failed
from pybackend.core.job.report import WorkerReport
from pybackend.core.launchers.fork_server import keeping_fork_server
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.package_files import load_own_libraries
from pybackend.core.launchers.remote.task import (
    MODEL,
    TASK,
    Post,
    RemoteGroup,
    RemoteTask,
    describe_failure,
    send_results,
    take_part,
)
from pybackend.core.machine import own_address
from pybackend.core.machine.processes import name_process
from pybackend.core.net.heartbeat import find_silence
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.rendezvous import split_address
from pybackend.core.words import setting, term

if TYPE_CHECKING:  # it has files of the driver
    from pybackend.core.launchers.spark.preflight import SparkEnvironment

SCHEMA = "rank int, report string, model_format string, model binary"
# Marks the data set of a row when training and validation rows travel together.
SET_COLUMN = "__tfdist_set__"
_PIECE_BYTES = 8 << 20
NO_OBSERVING = (
    "observers need connections from Spark's workers to the driver, and at least one worker "
    "cannot reach it. Set spark.driver.host to the address at which executors can reach the "
    "driver, and spark.driver.bindAddress to the address to listen on; or leave the observers out"
)
_Client = TypeVar("_Client", bound=MeetingClient)
# A driver that does not answer by then is unreachable: the tasks meet by Spark's allGather.
_DRIVER_SECONDS = 3.0
# ... unless it is needed: a busy machine may take longer to answer.
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
    """Input arrays from the driver, in the layout of `pybackend.core.data.row_store`.

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


@contextmanager
def living_with_driver(
    kind: Callable[..., _Client], member: Member, rank: int
) -> Iterator[_Client]:
    """Connect this process to the driver; when that disconnects, the process exits.

    By leaving its contexts, it stops its worker, and removes the worker's folder.
    """

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the driver ended the job"))
    meeting = kind(member.driver, member.token, rank, _WANTED_DRIVER_SECONDS, end)
    with meeting:
        meeting.require()
        meeting.start_beating(find_silence(member.job.timeout))
        yield meeting


def run_from_r(archive: str, rows: str, options: str) -> None:
    """Run one worker.

    Parameters
    ----------
    archive
        Archive from the driver: this package, and a pickled `Member`.
    rows
        File with this worker's rows, in the format of `pybackend.core.data.text`.
    options
        JSON with ``rank``, ``addresses``, ``cores`` and ``rscript``.

    Raises
    ------
    RuntimeError
        The worker failed, as in `fail_task`.
    ClusterError
        The driver cannot be reached.
    """
    load_own_libraries()
    given = json.loads(options)
    with zipfile.ZipFile(archive) as packed:
        # The driver pickled its own objects, and Spark delivered them like its tasks.
        member: Member = cloudpickle.loads(packed.read(TASK))
    rank = given["rank"]
    with living_with_driver(MeetingClient, member, rank) as meeting:
        hosts = [address.rpartition(":")[0].strip("[]") for address in given["addresses"]]
        # R does not know the GPUs of the task.
        group = RemoteGroup(rank, hosts, given["cores"], gpus=None, meeting=meeting)
        report, model = member.work(group, decode_lines(Path(rows)), meeting, given["rscript"])
        if report.failure is not None:
            fail_task(report.failure, meeting)
        send_results(meeting, report, model)


# Replaced by the driver with the host that the worker reported.
UNKNOWN_HOST = "its executor"
# Encloses an encoded failure in an exception's message.
_MARK = "~tfdist~"
_CAUSE_FIRST_SECONDS = 2.0
# A barrier stage's failure as Spark reports it; the number of the result's partition is the rank.
_EXECUTOR_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\).*\s+ExecutorLostFailure \(executor (\S+) exited "
    r"[^)]*\)(?: Reason: (.*))?"
)
_TASK_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\) finished unsuccessfully\.\s+"
    r"\S+: Python worker exited unexpectedly"
)


def fail_task(failure: Failure, emit: Emit) -> NoReturn:
    """Send the driver a worker's failure, and fail the task, so that Spark stops the other tasks.

    Parameters
    ----------
    emit
        Returns whether the event was sent; if not, the exception's message contains the failure.

    Raises
    ------
    RuntimeError
        Always.
    """
    is_sent = emit(Failed(failure))
    if failure.is_consequence:
        # The cause should end the Spark job and be in its message, which the driver reads.
        time.sleep(_CAUSE_FIRST_SECONDS)
    message = f"worker {failure.rank}: {failure.exception_type}: {failure.message}"
    if not is_sent:
        text = base64.b64encode(encode(failure).encode()).decode()
        message = f"{message} {_MARK}{text}{_MARK}"
    raise RuntimeError(message)


def find_failures(message: str) -> list[Failure]:
    """Return the failures that `fail_task`, or Spark, wrote into the message of Spark's error."""
    texts = dict.fromkeys(re.findall(f"{_MARK}([A-Za-z0-9+/=]+){_MARK}", message))
    sent = []
    for text in texts:
        with suppress(ValueError):  # then Spark's own text remains
            sent.append(decode(base64.b64decode(text), Failure))
    executors = [_describe_loss(*found) for found in _EXECUTOR_LOST.findall(message)[:1]]
    return sent + executors + [_describe_end(rank) for rank in _TASK_LOST.findall(message)[:1]]


def _describe_loss(rank: str, executor: str, reason: str) -> Failure:
    """Return the failure for a lost executor: other workers only see a closed connection."""
    return Failure(
        int(rank),
        f"executor {executor}",
        exception_type="ExecutorLost",
        message=f"Spark lost executor {executor}, in which the worker ran "
        f"({reason[:200] or 'no reason given'})",
        time=time.time(),
        advice=(
            "see that executor's log in Spark's web interface. Exit code 137 usually means that "
            "memory ran out: raise spark.executor.memoryOverhead, or lower batch_size"
        ),
    )


def _describe_end(rank: str) -> Failure:
    """Return the failure for a task whose Python was killed and could not report that."""
    return Failure(
        int(rank),
        UNKNOWN_HOST,
        exception_type="ProcessDied",
        message="the Spark task's Python process, which supervised the worker, was killed or "
        "crashed",
        time=time.time(),
        advice="check whether that host ran out of memory, or whether something kills processes "
        "there. If memory ran out, lower batch_size, or raise spark.executor.memoryOverhead",
    )
