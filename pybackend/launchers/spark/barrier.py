"""Workers in the tasks of one Spark barrier stage: PySpark sessions, classic or Connect.

The whole job is ``DataFrame.mapInArrow(task, barrier=True)``: Spark starts all tasks together or
none, and each task runs one worker process (`spark_task`).
"""

from __future__ import annotations

import json
import math
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pybackend.data.dataframe import DataFrameRows
from pybackend.data.packed import SCHEMA as BLOB_SCHEMA
from pybackend.data.packed import Counts, blobs, layout_of, rows_to_send
from pybackend.errors import ClusterError, Failure, InputError, WorkerFailedError, root_cause_first
from pybackend.job.job import Job, argument_of
from pybackend.job.report import WorkerReport
from pybackend.launchers.base import Emit, Outcome
from pybackend.launchers.spark.barrier_task import (
    SCHEMA,
    SET_COLUMN,
    Blobs,
    RowsOfFrame,
    Task,
    failures_in,
)
from pybackend.launchers.spark.explain import explain_spark_error
from pybackend.launchers.spark.jobs import IdleWatch, SparkJob, job_of
from pybackend.launchers.spark.network import LIMIT_SECONDS, TOO_LONG, check_network
from pybackend.launchers.spark.python import driver_python
from pybackend.launchers.spark.session import is_connect
from pybackend.launchers.spark.shipping import ship_package
from pybackend.launchers.spark.slots import check_slots, is_one_machine, setting
from pybackend.net.dialing import network_advice
from pybackend.net.events import EventServer
from pybackend.net.rendezvous import new_token, own_address

_HASH = "__tfdist_hash__"
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_ROWS_AT_ONCE = 2000
# Of Spark's limit for results: reports and Arrow's own bytes come on top of the model.
_RESULT_SHARE = 0.9


class SparkLauncher:
    """One task of a barrier stage per worker, in a session that is classic or Connect."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def launch(
        self,
        job: Job,
        files: Mapping[str, bytes],
        datasets: Mapping[str, Any],
        on_event: Emit,
    ) -> Outcome:
        """See `Launcher`."""
        session = self.session
        check_slots(session, job.workers)
        job = _with_model_limit(session, job)
        ship_package(session)
        token = new_token()
        loopback = is_one_machine(session)
        with ExitStack() as stack:
            stack.enter_context(driver_python(session))
            check_hosts(session, job, datasets)
            frame, source, counts = input_frame(session, job, datasets)
            server = _event_server(stack, session, token)
            driver = server.address if server else None
            task = Task(job, files, source, token, driver, loopback, counts)
            stack.enter_context(small_batches(session))
            rows = _collect(session, frame.mapInArrow(task, SCHEMA, barrier=True), server, on_event)
        if not rows:
            raise _nothing_returned(datasets)
        told = [row["report"] for row in rows if row["report"] is not None]
        reports = [WorkerReport.from_dict(json.loads(text)) for text in told]
        pieces = [row for row in rows if row["model"] is not None]
        model = None
        if pieces:
            model = pieces[0]["model_format"], b"".join(row["model"] for row in pieces)
        return Outcome(sorted(reports, key=lambda r: r.rank), model)


def launcher_of(target: Any) -> SparkLauncher | None:
    """A launcher if ``target`` is a ``SparkSession``, classic or Connect."""
    from pyspark.sql import SparkSession

    kinds: tuple[type, ...] = (SparkSession,)
    connect = sys.modules.get("pyspark.sql.connect.session")
    if connect is not None:
        kinds = (SparkSession, connect.SparkSession)
    return SparkLauncher(target) if isinstance(target, kinds) else None


def _nothing_returned(datasets: Mapping[str, Any]) -> InputError | ClusterError:
    """Spark starts no task for a DataFrame that it knows to be empty; nor does it always say that
    its memory has run out."""
    for name, data in datasets.items():
        if isinstance(data, DataFrameRows) and data.frame.isEmpty():
            return InputError(f"`{argument_of(name)}` has no rows")
    return ClusterError(
        "Spark has run the workers, but has not delivered what they returned: mostly its driver "
        "has too little memory. Raise spark.driver.memory, or give `model_uri`"
    )


def _with_model_limit(session: Any, job: Job) -> Job:
    """Spark fails a job whose results are larger than the driver is set to take."""
    told = setting(session, "spark.driver.maxResultSize") or "1g"
    known = re.fullmatch(r"(\d+)([kmgtp]?)b?", told.strip().lower())
    if known is None or int(known[1]) == 0:  # 0: as large as they are
        return job
    most = int(known[1]) << 10 * " kmgtp".index(known[2] or " ")
    return replace(job, model_limit=min(job.model_limit, int(most * _RESULT_SHARE)))


def check_hosts(session: Any, job: Job, datasets: Mapping[str, Any]) -> None:
    """Refuse rows that would have to move between hosts which cannot reach each other."""
    if datasets and job.workers > 1 and not is_one_machine(session):
        check_network(session, job.workers, partial(_collect, session, seconds=LIMIT_SECONDS))


def input_frame(
    session: Any, job: Job, datasets: Mapping[str, Any]
) -> tuple[Any, RowsOfFrame | Blobs | None, Counts]:
    """A DataFrame with one partition per worker, how a task reads it, and known numbers of rows."""
    if not datasets:
        return session.range(0, job.workers, 1, job.workers), None, {}
    kinds = {isinstance(data, DataFrameRows) for data in datasets.values()}
    if len(kinds) > 1:
        raise InputError(
            "`data` and `validation_data` must both be tables of Spark (DataFrames), or both "
            "arrays; files go with either"
        )
    if kinds == {True}:
        return *_frame_of_rows(session, job, datasets), {}
    return _frame_of_blobs(session, job, datasets)


def _frame_of_rows(
    session: Any, job: Job, datasets: Mapping[str, DataFrameRows]
) -> tuple[Any, RowsOfFrame]:
    source = RowsOfFrame({name: data.column_groups for name, data in datasets.items()})
    frames = [data.frame for data in datasets.values()]
    frame = frames[0]
    if len(frames) > 1:
        marked = [f.selectExpr("*", f"{place} AS {SET_COLUMN}") for place, f in enumerate(frames)]
        frame = marked[0].unionByName(marked[1])
    if not next(iter(datasets.values())).choice.repartition:
        _check_partitions(session, job, frames)
        return frame, source
    # Spread evenly, and mixed where partitions are sorted by label.
    frame = frame.repartition(job.workers)
    if job.is_seeded:
        # Rows come out of a shuffle in any order; a seed is to repeat theirs.
        names = ", ".join(frame.columns)
        hashed = frame.selectExpr("*", f"xxhash64({names}) AS {_HASH}")
        frame = hashed.sortWithinPartitions(_HASH).drop(_HASH)
    return frame, source


def _check_partitions(session: Any, job: Job, frames: Sequence[Any]) -> None:
    if len(frames) > 1:
        raise InputError(
            "repartition=False keeps the partitions of one DataFrame, and `validation_data` is "
            "another: pass it as files, or leave `repartition` alone"
        )
    if is_connect(session):  # does not tell before; the tasks count themselves
        return
    partitions = frames[0].rdd.getNumPartitions()
    if partitions != job.workers:
        raise InputError(
            f"repartition=False, but the DataFrame has {partitions} partitions, not workers="
            f"{job.workers}: use workers={partitions}, or df.repartition({job.workers})"
        )


def _frame_of_blobs(
    session: Any, job: Job, datasets: Mapping[str, Any]
) -> tuple[Any, Blobs, Counts]:
    keys = _partition_keys(session, job.workers)
    to_all = ("train",) if job.shuffle == "global" else ()
    counts = rows_to_send(datasets, job.workers)
    sent = rows_to_send(datasets, job.workers, to_all)
    rows = list(blobs(datasets, keys, to_all))
    if is_connect(session):
        frame = session.createDataFrame(rows, BLOB_SCHEMA)
    else:
        sliced = session.sparkContext.parallelize(rows, len(rows))
        frame = session.createDataFrame(sliced, BLOB_SCHEMA)
    return frame.repartition(job.workers, "key"), Blobs(layout_of(datasets), sent), counts


def _partition_keys(session: Any, workers: int) -> list[int]:
    """A key per rank that Spark's hash partitioning puts into the partition of that number."""
    found: dict[int, int] = {}
    candidates = 32 * workers
    while len(found) < workers:
        places = session.range(candidates).selectExpr("id", f"pmod(hash(id), {workers}) AS place")
        found = {row["place"]: row["id"] for row in places.collect()}
        candidates *= 4
    return [found[rank] for rank in range(workers)]


def driver_place(session: Any) -> tuple[str | None, str | None]:
    """Where the driver listens, and by which address executors reach it, as Spark was told.

    In a container, or behind an address translation, the two differ.
    """
    if is_one_machine(session):
        return "127.0.0.1", None
    host = (setting(session, "spark.driver.host") or "").strip("[]") or None
    bound = (setting(session, "spark.driver.bindAddress") or "").strip("[]") or None
    return bound or host, host


def _event_server(stack: ExitStack, session: Any, token: str) -> EventServer | None:
    """Listen for progress where executors may reach this process; None where they cannot."""
    if is_connect(session):
        host, announced = own_address(session.client.host), None
    else:
        host, announced = driver_place(session)
    if not host:
        return None
    try:
        return stack.enter_context(EventServer(host, token, announced))
    except ClusterError:  # the driver is behind an address that is not its own: no live progress
        return None


def _collect(
    session: Any,
    result: Any,
    server: EventServer | None = None,
    on_event: Emit = print,
    seconds: float = math.inf,
) -> list[Any]:
    """Run the Spark job on a thread, events and Ctrl-C on this one; not longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    outcome: queue.Queue[list[Any] | BaseException] = queue.Queue()
    events = server.queue if server else queue.Queue[dict[str, Any]]()
    failures: dict[int, Failure] = {}

    def submit() -> None:
        try:
            outcome.put(rows_returned(result))
        except BaseException as error:
            outcome.put(error)

    with job_of(session) as job:
        thread = job.thread(submit)
        watch = IdleWatch(job)
        thread.start()
        try:
            while thread.is_alive() or not events.empty():
                with suppress(queue.Empty):
                    _handle(events.get(timeout=0.1), failures, on_event)
                watch.look()
                if time.monotonic() > deadline:
                    raise ClusterError(TOO_LONG + network_advice())
        except BaseException:
            _end(job, thread)
            raise
    finished = outcome.get()
    if isinstance(finished, BaseException):
        _gather_failures(finished, failures, server, on_event)
        if failures:
            raise WorkerFailedError(root_cause_first(list(failures.values())))
        raise explain_spark_error(finished) from finished
    return finished


def rows_returned(result: Any) -> list[Any]:
    """All rows; as Arrow where this release of pyspark can, which copies bytes less often."""
    if hasattr(result, "toArrow"):
        rows: list[Any] = result.toArrow().to_pylist()
        return rows
    return list(result.collect())


def _end(job: SparkJob, thread: threading.Thread) -> None:
    """Cancel a job, and wait a little for its end."""

    def cancel() -> None:
        # Again and again: a job that is just being submitted cannot be cancelled yet.
        for _ in range(10):
            with suppress(Exception):
                job.cancel()
            thread.join(timeout=1)
            if not thread.is_alive():
                return

    # Not on this thread: a Connect server that is gone lets its client wait for minutes.
    threading.Thread(target=cancel, daemon=True).start()
    thread.join(timeout=10)


def _gather_failures(
    error: BaseException, failures: dict[int, Failure], server: EventServer | None, on_event: Emit
) -> None:
    """Add what Spark's own error tells of the workers, or what they have sent."""
    failures.update({f.rank: f for f in failures_in(str(error))})
    with suppress(queue.Empty):
        # What a worker has sent may still be on its way when Spark has already given up.
        while server and not failures:
            _handle(server.queue.get(timeout=2), failures, on_event)


def _handle(event: dict[str, Any], failures: dict[int, Failure], on_event: Emit) -> None:
    if event["event"] == "failed":
        failures[event["rank"]] = Failure.from_dict(event["failure"])
    else:
        on_event(event)


@contextmanager
def small_batches(session: Any) -> Iterator[None]:
    """Let Spark hand rows to tasks a few at a time: ten thousand wide ones are a lot of memory."""
    before = session.conf.get(_RECORDS, None)
    known = int(before or 0)  # 0 or less: no limit
    session.conf.set(_RECORDS, str(min(known, _ROWS_AT_ONCE) if known > 0 else _ROWS_AT_ONCE))
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(_RECORDS)
        else:
            session.conf.set(_RECORDS, before)
