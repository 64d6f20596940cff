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
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np

from pybackend.data.arrays import Columns, rows_of
from pybackend.data.blobs import Layout, columns_from_blobs
from pybackend.data.dataframe import columns_from_arrow
from pybackend.data.spool import write_columns
from pybackend.errors import ClusterError, InputError
from pybackend.events import EventClient
from pybackend.job import Job
from pybackend.launchers.child import Child, Emit
from pybackend.launchers.versions import difference, installed
from pybackend.rendezvous import own_address, split_address
from pybackend.result import Failure, WorkerReport

SCHEMA = "rank int, report string, model_format string, model binary"
# Marks which data set a row belongs to where training and validation rows travel together.
SET_COLUMN = "__tfdist_set__"
SETS = ("train", "validation")
# Encloses a failure's description in an exception's message.
MARK = "~tfdist~"
_CAUSE_FIRST_SECONDS = 2.0
# A barrier stage's failure as Spark tells it; the number of the result's partition is the rank.
_EXECUTOR_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\).*\s+ExecutorLostFailure \(executor (\S+) exited "
    r"[^)]*\)(?: Reason: (.*))?"
)


@dataclass(frozen=True)
class RowsOfFrame:
    """The input is rows of a DataFrame: features, label, and perhaps `SET_COLUMN`."""

    features: tuple[str, ...]
    label: str
    has_validation: bool

    def read(self, batches: Iterable[Any], rank: int, floatx: str) -> dict[str, Columns]:
        """This worker's rows by data set; none at all for an empty partition."""
        if not self.has_validation:
            return {"train": columns_from_arrow(batches, self.features, self.label, floatx)}
        kept: dict[str, list[Any]] = {name: [] for name in SETS}
        for batch in batches:
            of_set = batch.column(batch.num_columns - 1).to_numpy(zero_copy_only=False)
            for number, name in enumerate(SETS):
                kept[name].append(batch.take(np.flatnonzero(of_set == number)))
        return {
            name: columns_from_arrow(
                (b for b in parts if b.num_rows), self.features, self.label, floatx
            )
            for name, parts in kept.items()
        }


@dataclass(frozen=True)
class Blobs:
    """The input is arrays of the driver, as `pybackend.data.blobs` lays them out.

    ``sent`` rows reach each rank, which visits ``counts`` of them in an epoch.
    """

    layout: Layout
    sent: Mapping[str, list[int]]
    counts: Mapping[str, list[int]]

    def read(self, batches: Iterable[Any], rank: int, floatx: str) -> dict[str, Columns]:
        """This worker's rows by data set."""
        return columns_from_blobs(batches, self.layout, self.sent, rank)


@dataclass(frozen=True)
class Task:
    """The function that Spark runs on each partition; ``source`` None means no input."""

    job: Job
    files: Mapping[str, bytes]
    source: RowsOfFrame | Blobs | None
    token: str
    driver: str | None
    loopback: bool

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Run one worker; yields one row of `SCHEMA`, or raises so that Spark ends the others."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        emit = EventClient(self.driver, self.token, context.partitionId())
        try:
            report, model = self.work(context, batches, emit)
        finally:
            emit.close()
        yield _row(report, model)

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
        datasets: dict[str, Columns] = {}
        error: Exception | None = None
        try:
            if self.source is None:
                for _ in batches:
                    pass
            else:
                datasets = self.source.read(batches, child.rank, self.job.floatx)
        except Exception as caught:  # told to the others: they must not wait for this worker
            error = caught
        everyone = self._meet(child, context, datasets, error)
        failure = self._not_ready(child, everyone, error)
        if failure is not None:
            return WorkerReport(child.rank, child.host, child.pid, failure=failure)
        for name, columns in datasets.items():
            columns = columns or _empty_like([m["shapes"][name] for m in everyone])
            write_columns(child.folder / name, columns)
        counts = {name: [m["shapes"][name]["rows"] for m in everyone] for name in datasets}
        if isinstance(self.source, Blobs):
            counts = dict(self.source.counts)
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
    def _meet(
        child: Child, context: Any, datasets: Mapping[str, Columns], error: Exception | None
    ) -> list[dict[str, Any]]:
        """What every worker says of itself, by rank; all call it together, once."""
        message = {
            "address": child.address,
            "reserved": child.reserved,
            "host": child.host,
            "packages": installed(),
            "shapes": {name: _shapes(columns) for name, columns in datasets.items()},
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
            _check_shapes([m["shapes"] for m in everyone])
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


def _shapes(columns: Columns) -> dict[str, Any]:
    return {
        "rows": rows_of(columns) if columns else 0,
        "columns": {key: [a.dtype.str, list(a.shape[1:])] for key, a in columns.items()},
    }


def _empty_like(shapes: list[dict[str, Any]]) -> Columns:
    """Columns without rows, of the types and widths that the other workers have."""
    known = next(shape["columns"] for shape in shapes if shape["columns"])
    return {key: np.empty((0, *tail), dtype) for key, (dtype, tail) in known.items()}


def _check_shapes(shapes: list[dict[str, Any]]) -> None:
    """Refuse data sets without rows, and rows that differ from worker to worker."""
    for name in shapes[0]:
        known = {json.dumps(s[name]["columns"]) for s in shapes if s[name]["columns"]}
        argument = "`data`" if name == "train" else "`validation_data`"
        if not known or not sum(s[name]["rows"] for s in shapes):
            raise InputError(f"{argument} has no rows")
        if len(known) > 1:
            raise InputError(
                f"the rows of {argument} differ in width or type ({'; '.join(sorted(known))}): "
                "every row needs the same"
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


def _row(report: WorkerReport, model: tuple[str, bytes] | None) -> Any:
    import pyarrow as pa

    kind, content = model or (None, None)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([report.rank], pa.int32()),
            pa.array([json.dumps(asdict(report))], pa.string()),
            pa.array([kind], pa.string()),
            pa.array([content], pa.binary()),
        ],
        names=["rank", "report", "model_format", "model"],
    )
