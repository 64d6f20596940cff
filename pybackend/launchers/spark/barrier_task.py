"""What runs in each task of the barrier stage: one child process, fed, watched and ended.

This file is imported on the executors; the driver sends it there.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pybackend.data.arrow import TensorReader
from pybackend.data.columns import ColumnGroup
from pybackend.data.packed import Layout, spool_blobs
from pybackend.data.spool import SpoolWriter, check_layouts, layouts_in, settle
from pybackend.errors import ClusterError, Failure, InputError
from pybackend.job.job import Job
from pybackend.job.packages import difference, installed
from pybackend.job.report import WorkerReport
from pybackend.launchers.base import Emit
from pybackend.launchers.child import Child
from pybackend.net.events import EventClient
from pybackend.net.rendezvous import own_address, split_address

SCHEMA = "rank int, report string, model_format string, model binary"
# Marks which data set a row belongs to where training and validation rows travel together.
SET_COLUMN = "__tfdist_set__"
# Encloses a failure's description in an exception's message.
MARK = "~tfdist~"
_CAUSE_FIRST_SECONDS = 2.0
_PIECE_BYTES = 8 << 20
# A barrier stage's failure as Spark tells it; the number of the result's partition is the rank.
_EXECUTOR_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\).*\s+ExecutorLostFailure \(executor (\S+) exited "
    r"[^)]*\)(?: Reason: (.*))?"
)


@dataclass(frozen=True)
class RowsOfFrame:
    """The input is rows of one `DataFrameRows`, or of several, in which `SET_COLUMN` tells which.

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


@dataclass(frozen=True)
class Task:
    """The function that Spark runs on each partition; ``source`` None means no input.

    ``counts`` are rows of every rank, by data set, where the driver knows them before.
    """

    job: Job
    files: Mapping[str, bytes]
    source: RowsOfFrame | Blobs | None
    token: str
    driver: str | None
    loopback: bool
    counts: Mapping[str, list[int]] = field(default_factory=dict)

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Run one worker; yields rows of `SCHEMA`, or raises so that Spark ends the others."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        emit = EventClient(self.driver, self.token, context.partitionId())
        try:
            report, model = self.work(context, batches, emit)
        finally:
            emit.close()
        yield from rows_to_return(report, model)

    def work(
        self, context: Any, batches: Iterator[Any], emit: Emit, rscript: str | None = None
    ) -> tuple[WorkerReport, tuple[str, bytes] | None]:
        """Run one worker: its report and, on rank 0, the format and content of the model.

        Parameters
        ----------
        context
            A ``pyspark.BarrierTaskContext``, or what knows the same of the tasks.
        emit
            Sends events to the driver; returns whether they went out.
        rscript
            As in `Child`.

        Raises
        ------
        RuntimeError
            Where the worker failed.
        """
        rank = context.partitionId()
        if len(context.getTaskInfos()) != self.job.workers:
            raise RuntimeError(
                f"repartition=False, but the DataFrame has {len(context.getTaskInfos())} "
                f"partitions, not workers={self.job.workers}"
            )
        host = self._host(context, rank)
        variables = self._variables(context)
        with Child(self.job, rank, host, emit, variables, rscript) as child:
            child.start(self.files)
            report = self._train(child, context, batches)
            model = child.model() if rank == 0 else None
        if report.failure is not None:
            _fail(report.failure, emit)
        return report, model

    def _train(self, child: Child, context: Any, batches: Iterator[Any]) -> WorkerReport:
        """Feed the worker, bring it together with the others, and wait for its end."""
        error: Exception | None = None
        try:
            if self.source is None:
                for _ in batches:
                    pass
            else:
                self.source.spool(batches, child.rank, child.folder)
        except Exception as caught:  # told to the others: they must not wait for this worker
            error = caught
        everyone = self._meet(child, context, error)
        failure = self._not_ready(child, everyone, error)
        if failure is not None:
            return WorkerReport(child.rank, child.host, child.pid, failure=failure)
        counts = dict(self.counts)
        for name in everyone[0]["layouts"]:
            layouts = [m["layouts"][name] for m in everyone]
            settle(child.folder / name, layouts)
            counts.setdefault(name, [layout["rows"] for layout in layouts])
        child.go(
            {
                "token": self.token,
                "peers": [m["address"] for m in everyone],
                "reserved": [m["reserved"] for m in everyone],
                "counts": counts,
            }
        )
        return child.wait()

    @staticmethod
    def _meet(child: Child, context: Any, error: Exception | None) -> list[dict[str, Any]]:
        """What every worker says of itself, by rank; all call it together, once."""
        message = {
            "address": child.address,
            "reserved": child.reserved,
            "host": child.host,
            "packages": installed(),
            "layouts": {} if error else layouts_in(child.folder),
            "failed": error is not None,
        }
        return [json.loads(text) for text in context.allGather(json.dumps(message))]

    def _not_ready(
        self, child: Child, everyone: list[dict[str, Any]], error: Exception | None
    ) -> Failure | None:
        """Why this worker does not start; of all that do not, one at least has the cause."""
        if self.job.kind != "run":  # a function may do without TensorFlow
            found = difference([m["host"] for m in everyone], [m["packages"] for m in everyone])
            if found is not None:
                rank, message = found
                is_here = rank == child.rank
                return _failure(child, ClusterError(message)) if is_here else _stopped(child, rank)
        failed = [rank for rank, m in enumerate(everyone) if m["failed"]]
        if failed:
            return _failure(child, error) if error else _stopped(child, failed[0])
        try:
            check_layouts([m["layouts"] for m in everyone])
        except InputError as caught:
            return _failure(child, caught)
        return None

    def _host(self, context: Any, rank: int) -> str:
        if self.loopback:
            return "127.0.0.1"
        named = str(context.getTaskInfos()[rank].address).rpartition(":")[0].strip("[]")
        if self.driver and _is_loopback(named):
            # Debian gives a machine's own name an address that no other machine can reach.
            towards = own_address(split_address(self.driver)[0])
            if towards is not None:  # else the driver is out of reach: only progress needs it
                return towards
        return socket.getaddrinfo(named, None, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[return-value]

    @staticmethod
    def _variables(context: Any) -> dict[str, str]:
        cores = str(max(1, context.cpus()))
        variables = {"TF_NUM_INTRAOP_THREADS": cores, "OMP_NUM_THREADS": cores}
        gpus = context.resources().get("gpu")
        if gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
        return variables


def _is_loopback(name: str) -> bool:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]).startswith("127.")


def _fail(failure: Failure, emit: Emit) -> NoReturn:
    """Tell the driver why, and fail the task: Spark then ends the tasks that still run."""
    described = asdict(failure)
    told = emit({"event": "failed", "rank": failure.rank, "failure": described})
    if failure.is_consequence:
        # The cause is to be what ends the Spark job, and what the driver reads in its message.
        time.sleep(_CAUSE_FIRST_SECONDS)
    message = f"worker {failure.rank}: {failure.exception_type}: {failure.message}"
    if not told:
        text = base64.b64encode(json.dumps(described).encode()).decode()
        message = f"{message} {MARK}{text}{MARK}"
    raise RuntimeError(message)


def failures_in(message: str) -> list[Failure]:
    """Failures that `_fail` wrote into the message of Spark's own exception, or Spark itself."""
    texts = re.findall(f"{MARK}([A-Za-z0-9+/=]+){MARK}", message)
    told = [Failure.from_dict(json.loads(base64.b64decode(text))) for text in dict.fromkeys(texts)]
    return told + [_lost_with_executor(*found) for found in _EXECUTOR_LOST.findall(message)[:1]]


def _lost_with_executor(rank: str, executor: str, reason: str) -> Failure:
    """Other workers only see that a connection closed: Spark knows that an executor is gone."""
    return Failure(
        int(rank),
        f"executor {executor}",
        exception_type="ExecutorLost",
        message="Spark lost the executor that the worker ran in "
        f"({reason[:200] or 'no reason given'})",
        time=time.time(),
        advice=(
            "see that executor's log in Spark's web interface. Exit code 137 mostly means that "
            "memory ran out: raise spark.executor.memoryOverhead, or lower batch_size"
        ),
    )


def _failure(child: Child, error: Exception) -> Failure:
    is_told = isinstance(error, (InputError, ClusterError))
    return Failure(
        child.rank,
        child.host,
        exception_type=type(error).__name__,
        message=str(error),
        traceback="" if is_told else "".join(traceback.format_exception(error)),
        time=time.time(),
        # What to do about the cluster is in the message, which knows the hosts.
        advice="" if isinstance(error, ClusterError) else "mend the data, or choose other columns",
    )


def _stopped(child: Child, cause: int) -> Failure:
    return Failure(
        child.rank,
        child.host,
        exception_type="Stopped",
        message=f"did not start because worker {cause} could not",
        time=time.time(),
    )


def rows_to_return(report: WorkerReport, model: tuple[str, bytes] | None) -> Iterator[Any]:
    """The report, and the model in pieces: a row is copied several times on its way."""
    kind, content = model or (None, b"")
    yield _row(report.rank, json.dumps(asdict(report)), kind, None)
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
