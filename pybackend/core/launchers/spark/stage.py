"""A stage of workers on Spark, as the driver sees it: what it needs, and how it is followed.

Before it, other stages check that the hosts reach each other, and send them a Python environment.
Spark's own transfers wait minutes for a host behind a firewall, before any Python code runs in a
task. The network check's stage does not move any data, and takes a fraction of a second if the
network works.

The environment is packed once, and sent once to each host: the driver sends it to one executor of
each host, over tfdist's own connections. Spark sends files to every executor, even of the same
host, and so only if executors cannot connect to the driver.
"""

from __future__ import annotations

import base64
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pybackend.core.data import spark_rows
from pybackend.core.errors import ClusterError, Failure, InputError, TfdistError
from pybackend.core.job.codec import decode
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Arrival, Emit, Note
from pybackend.core.job.report import read_report
from pybackend.core.launchers.crew import Crew, describe_silence, take_all
from pybackend.core.launchers.environment.archive import PackedEnvironment, pack_for
from pybackend.core.launchers.environment.installing import ArchiveServer
from pybackend.core.launchers.member import read_handshake
from pybackend.core.launchers.spark import barrier_task as tasks
from pybackend.core.launchers.spark import sessions
from pybackend.core.launchers.spark.explain import run_explained
from pybackend.core.launchers.spark.spark_jobs import give_up_after, run_watched
from pybackend.core.machine import own_address
from pybackend.core.net.liveness import find_silence
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.rendezvous import advise_on_network
from pybackend.core.words import either, setting, show_bytes, term

# Replaced by the driver with the host that the worker reported.
UNKNOWN_HOST = "its executor"
_HASH = "__tfdist_hash__"
_LOOK_SECONDS = 0.02
# Keys by partition, by the number of partitions. Spark's hash is the same in every session.
_KEYS: dict[int, dict[int, int]] = {}
# Spark itself may wait for a peer to pass on the task's code: then this stage does not end.
LIMIT_SECONDS = 90.0
TOO_LONG = (
    f"Spark's executors did not report within {LIMIT_SECONDS:g} s whether they can reach each "
    "other: either they cannot, or their hosts are overloaded. "
)


def check_network(session: Any, workers: int) -> None:
    """Raise `ClusterError` if the hosts of a job's tasks cannot all reach each other.

    After about ten seconds; it names the two hosts, the address and what to do.
    """

    numbers = sessions.number_partitions(session, workers)
    plan = sessions.map_in_arrow(numbers, tasks.check_peers, tasks.NETWORK_SCHEMA, barrier=True)
    late = give_up_after(LIMIT_SECONDS, ClusterError(TOO_LONG + advise_on_network()))
    if rows := run_explained(session, plan.collect, check=late):
        problem = min(rows, key=lambda row: row["rank"])["problem"]
        more = f" ({len(rows)} of {workers} workers cannot reach another)"
        raise ClusterError(problem + more)


@contextmanager
def sent_environment(
    session: Any,
    job: Job,
    addresses: tuple[str | None, str | None],
    run: Callable[[Callable[[], list[Any]]], list[Any]],
    on_event: Emit,
    profile: Any = None,
) -> Iterator[tasks.SparkEnvironment | None]:
    """Send the environment of a job to the hosts that lack it; None if the job has none.

    Hosts can get it until the block ends. ``addresses`` are as in `driver_addresses`. ``run``
    returns the value of a call that runs a Spark job. ``on_event`` receives notes about the
    progress. ``profile`` has the resources of the workers' tasks. `InputError` if the environment
    cannot run this job's workers; `ClusterError` if a host cannot, or has too little disk.
    """

    def say(text: str) -> None:
        on_event(Note(text))

    if (packed := pack_for(job, say)) is None:
        yield None
        return
    shipped, file = sessions.shipped_to(session), tasks.FILE.format(packed.name)
    with ExitStack() as stack:
        environment = None if file in shipped else _serve(stack, packed, *addresses)
        if environment is not None and packed.name not in shipped:
            say(f"sending the Python environment ({show_bytes(packed.size)}) to the hosts")
            with sessions.driver_python(session):
                numbers = sessions.number_partitions(session, job.workers)
                options, schema = choose_options(profile), tasks.ENVIRONMENT_SCHEMA
                plan = sessions.map_in_arrow(numbers, environment, schema, **options)
                rows = run(plan.collect)
            if other := next((row for row in rows if not row["is_unreached"]), None):
                raise ClusterError(other["problem"])
            if rows:
                say(f"{rows[0]['problem']}: Spark sends the environment to each executor")
                environment = None
            else:
                shipped.add(packed.name)
        if environment is not None:
            yield environment
            return
    with sessions.SHIPPING:
        if file not in shipped:
            say(f"sending the Python environment ({show_bytes(packed.size)}) through Spark")
            request = "to take the Python environment"
            sessions.send_file(session, request, packed.size, partial(_link, packed))
            shipped.add(file)
    yield tasks.SparkEnvironment(packed)


def _serve(
    stack: ExitStack, packed: PackedEnvironment, host: str | None, announced: str | None
) -> tasks.SparkEnvironment | None:
    """Return an environment that this process sends; None if it cannot listen for the hosts."""
    if host is not None:
        with suppress(ClusterError):  # the driver's address belongs to another machine
            server = stack.enter_context(ArchiveServer(packed, host, announced))
            return tasks.SparkEnvironment(packed, server.archive)
    return None


def choose_options(profile: Any) -> dict[str, Any]:
    """Return the options of `mapInArrow` for a barrier stage; before Spark 4, none is a profile."""
    return {"barrier": True, **({"profile": profile} if profile else {})}


def _link(packed: PackedEnvironment, folder: Path) -> str:
    """Link or copy the file into a folder, under the name of its content."""
    path = folder / tasks.FILE.format(packed.name)
    # The file of a call that was interrupted made the next one fail
    # (test_a_file_is_placed_again_after_a_call_that_was_interrupted).
    path.unlink(missing_ok=True)
    try:
        os.link(packed.path, path)
    except OSError:  # on another disk
        shutil.copyfile(packed.path, path)
    return str(path)


def check_hosts(session: Any, job: Job, datasets: Mapping[str, Any]) -> None:
    """Raise an error if rows would have to move between hosts that cannot reach each other."""
    if datasets and job.workers > 1 and not sessions.is_one_machine(session):
        check_network(session, job.workers)


def input_frame(
    session: Any, job: Job, datasets: Mapping[str, Any]
) -> tuple[Any, tasks.RowsOfFrame | tasks.Blobs | None, spark_rows.Counts]:
    """Return a DataFrame with one partition per worker, its reader, and known numbers of rows."""
    if not datasets:
        return sessions.number_partitions(session, job.workers), None, {}
    are_frames = [isinstance(data, spark_rows.DataFrameRows) for data in datasets.values()]
    if not any(are_frames):
        return _frame_of_blobs(session, job, datasets)
    if not all(are_frames):
        raise InputError(
            f"`data` and `validation_data` must each be a {term('Spark DataFrame')}, or both be "
            "arrays; files can be combined with either"
        )
    _check_partitions(session, job, list(datasets.values()))
    return *sessions.ask(session, "a plan", lambda: _frame_of_rows(job, datasets)), {}


def _frame_of_rows(
    job: Job, datasets: Mapping[str, spark_rows.DataFrameRows]
) -> tuple[Any, tasks.RowsOfFrame]:
    source = tasks.RowsOfFrame({name: data.column_groups for name, data in datasets.items()})
    frames = [data.frame for data in datasets.values()]
    frame = frames[0]
    if len(frames) > 1:
        marked = [f.selectExpr("*", f"{n} AS {tasks.SET_COLUMN}") for n, f in enumerate(frames)]
        frame = marked[0].unionByName(marked[1])
    if not next(iter(datasets.values())).spec.repartition:
        return frame, source
    # Even partitions, and mixed rows in case the partitions are sorted by label.
    frame = frame.repartition(job.workers)
    if job.repeats_rows or job.is_elastic:
        # A shuffle returns rows in any order. A seed must reproduce their order, and all workers of
        # an elastic training must have the same.
        names = ", ".join(frame.columns)
        hashed = frame.selectExpr("*", f"xxhash64({names}) AS {_HASH}")
        frame = hashed.sortWithinPartitions(_HASH).drop(_HASH)
    return frame, source


def _check_partitions(session: Any, job: Job, datasets: Sequence[spark_rows.DataFrameRows]) -> None:
    if datasets[0].spec.repartition:
        return
    if len(datasets) > 1:
        raise InputError(
            f"{setting(repartition=False)} supports only one {term('DataFrame')}, but "
            "`validation_data` is a second one: pass it as files, or leave out `repartition`"
        )
    if sessions.is_connect(session):  # does not know the number in advance; the tasks check it
        return
    partitions = run_watched(session, lambda: int(datasets[0].frame.rdd.getNumPartitions()))
    if partitions != job.workers:
        raise InputError(
            f"{setting(repartition=False)}, but the {term('DataFrame')} has {partitions} "
            f"partitions, not {setting(workers=job.workers)}: use {setting(workers=partitions)}, "
            f"or {either('df.repartition(', 'sparklyr::sdf_repartition(data, ')}{job.workers})"
        )


def _frame_of_blobs(
    session: Any, job: Job, datasets: Mapping[str, Any]
) -> tuple[Any, tasks.Blobs, spark_rows.Counts]:
    keys = _partition_keys(session, job.workers)
    to_all = ("train",) if job.shuffles_globally else ()
    counts = spark_rows.count_rows_to_send(datasets, job.workers)
    sent = spark_rows.count_rows_to_send(datasets, job.workers, to_all)
    rows = list(spark_rows.pack_blobs(datasets, keys, to_all))

    def send() -> Any:
        is_connect = sessions.is_connect(session)
        sliced = rows if is_connect else session.sparkContext.parallelize(rows, len(rows))
        return session.createDataFrame(sliced, spark_rows.SCHEMA).repartition(job.workers, "key")

    size = sum(len(value) for row in rows for value in row if isinstance(value, bytes))
    frame = sessions.ask(session, f"a {term('DataFrame')} of the rows", send, size)
    return frame, tasks.Blobs(spark_rows.describe_layout(datasets), sent), counts


def _partition_keys(session: Any, workers: int) -> list[int]:
    """Return a key for each rank that Spark's hash partitioning assigns to the rank's partition."""
    found, candidates = _KEYS.get(workers, {}), 32 * workers

    def hash_keys() -> list[Any]:
        ids = session.range(candidates)
        return list(ids.selectExpr("id", f"pmod(hash(id), {workers}) AS rank").collect())

    while len(found) < workers:
        found = {row["rank"]: row["id"] for row in run_watched(session, hash_keys)}
        candidates *= 4
    _KEYS[workers] = found
    return [found[rank] for rank in range(workers)]


def driver_addresses(session: Any) -> tuple[str | None, str | None]:
    """Return the address on which the driver listens, and the one at which executors reach it.

    In a container or behind NAT, the two differ; Spark's settings contain both. Over Connect, it is
    the address on the route to the server. None: unknown, or the same.
    """
    if sessions.is_connect(session):
        return own_address(session.client.host), None
    if sessions.is_one_machine(session):
        return "127.0.0.1", None
    names = ("spark.driver.host", "spark.driver.bindAddress")
    host, bound = ((sessions.read_setting(session, n) or "").strip("[]") or None for n in names)
    return bound or host, host


def open_meeting(session: Any, token: str, job: Job, patience: float = math.inf) -> MeetingServer:
    """Return the server at which the workers rendezvous, in this process.

    With a finite ``patience``, in seconds, they can also meet elsewhere: then the server has no
    address if executors cannot reach this process. `ClusterError` if the driver cannot listen at
    the address in Spark's settings.
    """
    host, announced = driver_addresses(session)
    silence = find_silence(job.timeout)
    serve = partial(MeetingServer, token=token, workers=job.workers, silence=silence)
    listen = partial(serve, patience=patience)
    try:
        if host is None:
            raise ClusterError("the session does not report spark.driver.host")
        return listen(host, announced=announced)
    except ClusterError as error:  # the driver's address belongs to another machine
        if math.isfinite(patience):
            return listen(None)
        raise ClusterError(
            f"the workers cannot connect to the driver: {error}. Set spark.driver.host to the "
            "address at which executors can reach it, and spark.driver.bindAddress to the address "
            "to listen on"
        ) from error


def follow_stage(
    job: Job,
    server: MeetingServer,
    on_event: Emit,
    watch: Callable[[], Mapping[int, str | bytes | None] | None],
    explain: Callable[[Exception], BaseException],
    check: Callable[[], object] = lambda: None,
) -> Crew:
    """Follow the workers of a barrier stage until all have reported, or one has failed.

    ``watch`` is called repeatedly. It returns None while the stage is running, and then the reports
    by rank. It raises `ClusterError` if the stage cannot continue, or Spark's error if it has
    failed; ``explain`` returns the error for that, if no worker reports the cause. ``check`` is as
    in `Crew.follow`.
    """
    crew = Crew(job, on_event, server.order, UNKNOWN_HOST, ends_together=True)

    def listen(seconds: float) -> None:
        take_all(server.queue, crew.hear, min(seconds, _LOOK_SECONDS))

    def look() -> None:
        stalled = [describe_silence(rank, UNKNOWN_HOST, server.silence) for rank in server.silent()]
        crew.lose(_name_hosts(stalled, server))
        try:
            texts = watch()
        except TfdistError:
            raise
        except Exception as error:
            crew.lose(_name_hosts(find_failures(str(error)), server))
            # Its frames are Java's, and the message contains their text.
            raise (ClusterError(str(error)) if crew.has_failed else explain(error)) from None
        if texts is not None:
            listen(0)
            for rank in range(job.workers):
                crew.hear(read_report(texts.get(rank), rank, host_of(rank, server)))

    crew.follow(listen, look, check)
    return crew


def _name_hosts(failures: list[Failure], server: MeetingServer) -> list[Failure]:
    """Return the failures, with executors replaced by the hosts that the workers reported."""
    return [
        replace(failure, host=host_of(failure.rank, server, failure.host))
        if failure.host == UNKNOWN_HOST or failure.exception_type == "ExecutorLost"
        else failure
        for failure in failures
    ]


def host_of(rank: int, server: MeetingServer, unknown: str = UNKNOWN_HOST) -> str:
    said = server.messages.get(rank)
    with suppress(ClusterError):
        return read_handshake(said, Arrival, f"worker {rank}").host if said else unknown
    return unknown


# A barrier stage's failure as Spark reports it; the number of the result's partition is the rank.
_EXECUTOR_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\).*\s+ExecutorLostFailure \(executor (\S+) exited "
    r"[^)]*\)(?: Reason: (.*))?"
)
_TASK_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\) finished unsuccessfully\.\s+"
    r"\S+: Python worker exited unexpectedly"
)


def find_failures(message: str) -> list[Failure]:
    """Return the failures that `fail_task`, or Spark, wrote into the message of Spark's error."""
    mark = tasks.FAILURE_MARK
    texts = dict.fromkeys(re.findall(f"{mark}([A-Za-z0-9+/=]+){mark}", message))
    sent = []
    for text in texts:
        with suppress(ValueError):  # then Spark's own text remains
            sent.append(decode(base64.b64decode(text), Failure))
    executors = [_describe_loss(*found) for found in _EXECUTOR_LOST.findall(message)[:1]]
    return sent + executors + [_describe_end(rank) for rank in _TASK_LOST.findall(message)[:1]]


def _describe_loss(rank: str, executor: str, reason: str) -> Failure:
    # Other workers only see a closed connection.
    why = reason[:200] or "no reason given"
    text = f"Spark lost executor {executor}, in which the worker ran ({why})"
    advice = (
        "see that executor's log in Spark's web interface. Exit code 137 usually means that memory "
        "ran out: raise spark.executor.memoryOverhead, or lower batch_size"
    )
    host, now = f"executor {executor}", time.time()
    return Failure(int(rank), host, "ExecutorLost", text, time=now, advice=advice)


def _describe_end(rank: str) -> Failure:
    # The Python of the task was killed, and could not report that itself.
    text = "the Spark task's Python process, which supervised the worker, was killed or crashed"
    advice = (
        "check whether that host ran out of memory, or whether something kills processes there. If "
        "memory ran out, lower batch_size, or raise spark.executor.memoryOverhead"
    )
    now = time.time()
    return Failure(int(rank), UNKNOWN_HOST, "ProcessDied", text, time=now, advice=advice)
