"""Code for each task of a barrier stage: check the network, unpack Python, run one worker.

This file is imported on the executors; the driver sends it there. In a stage that sparklyr runs, R
on an executor calls `run_from_r` in a process, which starts R. The first R belongs to sparklyr, and
passes on the rank and the addresses. The second R is the worker: R with Python and TensorFlow
embedded, started and watched like every other worker.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import cloudpickle
import numpy as np

import pybackend
from pybackend.core.data.arrow import TensorReader
from pybackend.core.data.columns import ColumnGroup
from pybackend.core.data.row_store import RowStoreWriter
from pybackend.core.data.spark_rows import Layout, decode_lines, store_blobs
from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.codec import encode
from pybackend.core.job.job import Job, TrainingJob
from pybackend.core.job.messages import Emit, Failed
from pybackend.core.job.report import WorkerReport
from pybackend.core.launchers.environment import installing
from pybackend.core.launchers.environment.archive import PackedEnvironment
from pybackend.core.launchers.fork_server import forking_workers
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.package_files import load_own_libraries
from pybackend.core.launchers.remote import task as remote
from pybackend.core.launchers.remote.bundle import read_blocks
from pybackend.core.machine import own_address
from pybackend.core.machine.processes import name_process
from pybackend.core.net.liveness import find_silence
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.rendezvous import find_unreachable, split_address
from pybackend.core.words import setting, term

NETWORK_SCHEMA = "rank int, problem string"
# Number of other hosts that each host tries: enough to find hosts behind a firewall in one round.
_MOST_TRIED = 64


def check_peers(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield a row of `NETWORK_SCHEMA` if another task's host is unreachable; runs in each task.

    Executors are identified by the port of their connection to the driver. Usually no process
    listens there, and a refused connection shows that the network lets connections through.
    """
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    # Otherwise Spark ends this Python process and starts another, which costs the workers' tasks
    # seconds (test_the_check_of_the_network_leaves_its_pythons_to_the_next_tasks).
    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    rank = context.partitionId()
    peers = [str(info.address) for info in context.getTaskInfos()]
    others = [(rank + step) % len(peers) for step in range(1, min(len(peers), _MOST_TRIED + 1))]
    if problem := find_unreachable(peers, rank, others):
        columns = [pa.array([rank], pa.int32()), pa.array([problem])]
        yield pa.RecordBatch.from_arrays(columns, names=["rank", "problem"])


# Folders that Spark removes with the application, in Spark's own order: those of a standalone
# cluster and of YARN are shared by the executors of a host, the last is the executor's.
_FOLDERS = (("SPARK_EXECUTOR_DIRS", os.pathsep), ("LOCAL_DIRS", ","), ("SPARK_LOCAL_DIRS", ","))
ENVIRONMENT_SCHEMA = "problem string, is_unreached boolean"
# Spark unpacks files whose names end like that of a tar file, on each executor.
FILE = "{}.gz"


@dataclass(frozen=True)
class SparkEnvironment:
    """A packed environment for the executors.

    The driver sends it from ``served``; None: every executor gets the file from Spark, with its
    first task.
    """

    packed: PackedEnvironment
    served: installing.ServedArchive | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Unpack it in a Spark task; yield a row of `ENVIRONMENT_SCHEMA` if that fails."""
        import pyarrow as pa

        for _ in batches:  # else Spark ends this Python process, and starts another
            pass
        try:
            self.install()
        except ClusterError as error:
            columns = [
                pa.array([str(error)]),
                pa.array([isinstance(error, installing.UnreachedError)]),
            ]
            yield pa.RecordBatch.from_arrays(columns, names=["problem", "is_unreached"])

    def install(self) -> installing.Interpreter:
        """Unpack it on this host, unless another executor or an earlier call has done that.

        If the process that unpacks it is killed, the next one that waits takes over. `ClusterError`
        if it cannot run here, the disk is full, or the driver cannot be reached (`UnreachedError`).
        """
        root = _find_folder()
        # A lock of the system, as it ends with its process, unlike a file that exists
        # (test_another_executor_takes_over_from_one_that_is_killed).
        with open(os.path.join(root, f".{self.packed.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.served is not None:
                found = installing.install_here(self.packed, self.served.read(), root)
            else:
                found = self._install_from_spark(root)
        return replace(found, paths=_list_paths())

    def _install_from_spark(self, root: str) -> installing.Interpreter:
        """Unpack this executor's copy, and remove it; later executors need the driver's own."""
        from pyspark import SparkFiles

        own, archive = self.packed.path, str(SparkFiles.get(FILE.format(self.packed.name)))
        found = installing.install_here(self.packed, read_blocks(archive), root)
        with suppress(OSError):
            if not os.path.exists(own) or not os.path.samefile(own, archive):
                os.unlink(archive)
        return found


def _find_folder() -> str:
    for name, separator in _FOLDERS:
        for folder in os.environ.get(name, "").split(separator):
            if os.path.isdir(folder) and os.access(folder, os.W_OK):
                return folder
    from pyspark import SparkFiles

    return str(SparkFiles.getRootDirectory())


def _list_paths() -> tuple[str, ...]:
    """Return the paths of this package and of the modules that were added to the session."""
    from pyspark import SparkFiles

    own = os.path.abspath(Path(pybackend.__file__).parents[1])
    root = os.path.abspath(SparkFiles.getRootDirectory())
    found = (os.path.abspath(path) for path in sys.path)  # an empty one is the current folder
    added = [path for path in found if os.path.commonpath([root, path]) == root]
    return tuple(dict.fromkeys([own, *added]))


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
        self._context, self._meeting, self._needs_driver = context, meeting, needs_driver
        self.rank: int = context.partitionId()
        addresses = [str(info.address) for info in context.getTaskInfos()]
        self.hosts = list(map(_host_of, addresses))
        # An address names an executor, by its host and port.
        executors = map(_host_of, set(addresses))
        self.executors_here = list(executors).count(self.hosts[self.rank])
        self.cores = max(int(context.cpus()), cores)
        gpus = context.resources().get("gpu")
        self.gpus = None if gpus is None else list(gpus.addresses)

    def gather(self, message: str) -> list[str]:
        everyone = self._meeting.gather(message)
        if everyone is None and self._needs_driver:
            raise ClusterError(NO_OBSERVING)
        # Spark's takes a second.
        return list(self._context.allGather(message)) if everyone is None else everyone


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def forking_from_executor(job: Job, group: BarrierGroup) -> AbstractContextManager[object]:
    """Fork the workers of this block from the executor's server, if the job wants one."""
    # Spark's daemon, or the executor itself, starts the Python processes of tasks.
    parent = os.getppid()
    if job.resources.fork_server and job.kind != "run" and parent != 1:
        with suppress(OSError):  # it has ended, or this is not Linux
            return forking_workers(group.executors_here, name_process(parent))
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
        member, rank, job = self.member, context.partitionId(), self.member.job
        tasks = len(context.getTaskInfos())
        if tasks != job.workers:
            raise RuntimeError(
                f"{setting(repartition=False)}, but the {term('DataFrame')} has {tasks} "
                f"partitions, not {setting(workers=job.workers)}"
            )
        writes_events = isinstance(job, TrainingJob) and job.tensorboard is not None
        patience = _WANTED_DRIVER_SECONDS if job.is_observed or writes_events else _DRIVER_SECONDS
        with _connect(MeetingClient, member, rank, patience) as meeting:

            def give_up() -> str | None:
                is_lost = job.is_observed and meeting.has_ended
                return f"{_LOST_DRIVER}, which monitors the training" if is_lost else None

            group = BarrierGroup(context, meeting, self.cores, job.is_observed)
            try:
                member = self.unpack()
            except Exception as error:
                fail_task(remote.describe_failure(rank, group.hosts[rank], error), meeting)
            with forking_from_executor(job, group):
                report, model = member.work(
                    group, batches, meeting, give_up=give_up, orders=meeting.poll_order
                )
            if report.failure is not None:
                fail_task(report.failure, meeting)
            rows = list(rows_to_return(report, None if has_sent(meeting, model) else model))
        yield from rows

    def unpack(self) -> Member:
        """Return the member, whose worker runs in the environment that is unpacked on this host."""
        if self.environment is None:
            return self.member
        return replace(self.member, interpreter=self.environment.install())


@dataclass(frozen=True)
class ElasticTask:
    """Function that Spark runs on a single partition, in a barrier stage of one task.

    Spark never attempts this stage again, not even after it has lost the executor: a barrier stage
    that returns a job's result fails its job, because Spark may have delivered part of the result.
    (Other barrier stages are resubmitted.) The driver starts another worker instead, with a number
    of its own. A second attempt could not join: the driver accepts a single connection per worker.

    ``task`` is what all workers have in common, and the address of the driver; ``post`` is the
    settings of this worker.
    """

    task: Task
    post: remote.Post

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Run the worker; yield nothing, because it reports to the driver."""
        from pyspark import BarrierTaskContext

        member = self.task.member
        with _connect(MeetingClient, member, 0, _WANTED_DRIVER_SECONDS) as meeting:
            meeting.require()
            group = BarrierGroup(BarrierTaskContext.get(), meeting, self.task.cores)
            try:
                member = self.task.unpack()
            except Exception as error:  # such as a full disk
                meeting(Failed(remote.describe_failure(0, group.hosts[0], error)))
                return

            def give_up() -> str | None:
                return _LOST_DRIVER if meeting.has_ended else None

            reached = own_address(split_address(member.driver or "")[0])
            own = (remote.RemoteTask(member, tuple(group.hosts)), 0, batches, meeting)
            slot = (group.cores, group.gpus, reached)
            with forking_from_executor(member.job, group):
                remote.take_part(*own, *slot, post=self.post, give_up=give_up)
        yield from ()


@dataclass(frozen=True)
class RowsOfFrame:
    """Input rows of one `DataFrameRows`, or of several, which `SET_COLUMN` distinguishes.

    ``column_groups`` are the tensors made from them, by data set.
    """

    column_groups: Mapping[str, tuple[ColumnGroup, ...]]

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        with ExitStack() as stack:
            stores = [RowStoreWriter(folder / name) for name in self.column_groups]
            writers = list(map(stack.enter_context, stores))
            readers = list(map(TensorReader, self.column_groups.values()))
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
        store_blobs(batches, self.layout, self.sent, rank, folder)


def has_sent(meeting: MeetingClient, model: tuple[str, bytes] | None) -> bool:
    """Send the model to the driver, at a third of the cost of rows; return whether it was sent."""
    if model is None or meeting.error is not None or meeting.has_ended:
        return False
    with suppress(ClusterError):  # the connection failed, but Spark's may not
        meeting.send(remote.MODEL + model[0], model[1])
        return True
    return False


def rows_to_return(report: WorkerReport, model: tuple[str, bytes] | None) -> Iterator[Any]:
    """Yield the report, and the model in pieces, because Spark copies each row several times."""
    import pyarrow as pa

    types = {"rank": "int32", "report": "string", "model_format": "string", "model": "binary"}
    schema = pa.schema([(name, pa.type_for_alias(alias)) for name, alias in types.items()])
    kind, content = model or (None, b"")
    row = {"rank": report.rank, "model_format": kind}
    yield pa.RecordBatch.from_pylist([{**row, "report": encode(report)}], schema)
    for first in range(0, len(content), _PIECE_BYTES):
        piece = content[first : first + _PIECE_BYTES]
        yield pa.RecordBatch.from_pylist([{**row, "model": piece}], schema)


@contextmanager
def _connect(
    kind: Callable[..., _Client],
    member: Member,
    rank: int,
    patience: float,
    on_lost: Callable[[], None] = lambda: None,
) -> Iterator[_Client]:
    """Connect a task to the driver, and show it that this process is alive."""
    meeting = kind(member.driver, member.token, rank, patience, on_lost)
    with meeting:
        meeting.start_beating(find_silence(member.job.timeout))
        yield meeting


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
    with _connect(kind, member, rank, _WANTED_DRIVER_SECONDS, end) as meeting:
        meeting.require()
        yield meeting


def run_from_r(archive: str, rows: str, options: str) -> None:
    """Run one worker; raise as `fail_task` does, or `ClusterError` if the driver cannot be reached.

    ``archive`` comes from the driver: this package, and a pickled `Member`. ``rows`` is a file in
    the format of `data.spark_rows`. ``options`` is JSON with ``rank``, ``addresses``, ``cores`` and
    ``rscript``.
    """
    load_own_libraries()
    given = json.loads(options)
    with zipfile.ZipFile(archive) as packed:
        # The driver pickled its own objects, and Spark delivered them like its tasks.
        member: Member = cloudpickle.loads(packed.read(remote.TASK))
    rank = given["rank"]
    with living_with_driver(MeetingClient, member, rank) as meeting:
        hosts = list(map(_host_of, given["addresses"]))
        # R does not know the GPUs of the task.
        group = remote.RemoteGroup(rank, hosts, given["cores"], gpus=None, meeting=meeting)
        report, model = member.work(group, decode_lines(Path(rows)), meeting, given["rscript"])
        if report.failure is not None:
            fail_task(report.failure, meeting)
        remote.send_results(meeting, report, model)


# Encloses an encoded failure in an exception's message.
FAILURE_MARK = "~tfdist~"
_CAUSE_FIRST_SECONDS = 2.0


def fail_task(failure: Failure, emit: Emit) -> NoReturn:
    """Send the driver a worker's failure, and fail the task, so that Spark stops the other tasks.

    If ``emit`` returns that it could not send the failure, the `RuntimeError` contains it.
    """
    is_sent = emit(Failed(failure))
    if failure.is_consequence:
        # The cause should end the Spark job and be in its message, which the driver reads.
        time.sleep(_CAUSE_FIRST_SECONDS)
    text = base64.b64encode(encode(failure).encode()).decode()
    more = "" if is_sent else f" {FAILURE_MARK}{text}{FAILURE_MARK}"
    raise RuntimeError(f"worker {failure.rank}: {failure.exception_type}: {failure.message}{more}")
