"""Launcher of workers in the tasks of a Spark barrier stage, for classic and Connect sessions.

The whole job is ``DataFrame.mapInArrow(task, barrier=True)``: Spark starts either all tasks
together or none, and each task runs one worker process (`barrier_task`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pybackend.core.data.dataframe import DataFrameRows
from pybackend.core.data.row_store import SCHEMA as BLOB_SCHEMA
from pybackend.core.data.row_store import Counts, count_rows_to_send, describe_layout, pack_blobs
from pybackend.core.errors import ClusterError, Failure, InputError, TfdistError
from pybackend.core.job.job import LOGGER, Job, TrainingJob, argument_of
from pybackend.core.job.messages import Emit
from pybackend.core.job.packages import SET_PYSPARK_PYTHON
from pybackend.core.job.report import read_report
from pybackend.core.launchers.base import DataSets, Files, Outcome, Submission
from pybackend.core.launchers.crew import Crew, describe_silence, take_all
from pybackend.core.launchers.fork_server import is_off
from pybackend.core.launchers.member import Member, read_arrival
from pybackend.core.launchers.remote.group import run_on_hosts
from pybackend.core.launchers.remote.task import receive_model
from pybackend.core.launchers.spark.attach import why_not_handed_over
from pybackend.core.launchers.spark.barrier_task import (
    NO_OBSERVING,
    SCHEMA,
    SET_COLUMN,
    UNKNOWN_HOST,
    Blobs,
    RowsOfFrame,
    Task,
    find_failures,
)
from pybackend.core.launchers.spark.elastic import TaskWay
from pybackend.core.launchers.spark.explain import explain_spark_error, quiet_log, run_explained
from pybackend.core.launchers.spark.jobs import remember_properties, run_watched, running
from pybackend.core.launchers.spark.preflight import check_network, sent_environment
from pybackend.core.launchers.spark.session import (
    ask,
    driver_python,
    is_connect,
    is_one_machine,
    is_session,
    read_setting,
    ship_package,
    small_batches,
)
from pybackend.core.launchers.spark.slots import (
    check_slots,
    choose_lanes,
    cores_of_task,
    make_profile,
    take_slots,
)
from pybackend.core.launchers.stopping import check_stop
from pybackend.core.machine import own_address
from pybackend.core.net.heartbeat import find_silence
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.rendezvous import new_token
from pybackend.core.words import either, setting, term

_HASH = "__tfdist_hash__"
# Tasks of a barrier stage start together, but Python may start slowly on a busy host.
_MEET_SECONDS = 15.0
# Spark sends an environment to an executor before the task starts.
_INSTALL_SECONDS = 1800.0
_LOOK_SECONDS = 0.02
# The last bytes of a model may still be on their way when its task has ended.
_DELIVERY_SECONDS = 60.0
# Keys by partition, by the number of partitions. Spark's hash is the same in every session.
_KEYS: dict[int, dict[int, int]] = {}
# Share of Spark's limit for results; reports and Arrow's overhead need the rest.
_RESULT_SHARE = 0.9


class SparkLauncher:
    """Launcher that runs workers in the tasks of a barrier stage, in a classic or Connect session.

    ``look`` is called repeatedly while the workers run; an error that it raises stops them. With
    ``on_wait``, the workers wait for slots that other jobs hold, as long as tasks of those jobs are
    running. If the wait is long, ``on_wait`` is called once, with a description. Without it, they
    fail after a minute. ``lanes`` is the number of such launchers that run at once.
    """

    where = "tasks of a Spark job"
    is_here = False
    workers = None
    why_fixed = None

    def __init__(
        self,
        session: Any,
        look: Callable[[], object] = check_stop,
        on_wait: Callable[[str], object] | None = None,
        lanes: int = 1,
    ) -> None:
        self.session = session
        self._look = look
        self._on_wait = on_wait
        self._lanes = lanes

    @property
    def why_bound(self) -> str | None:
        """Reason why the session ends with this process; None: it has a server of its own."""
        return why_not_handed_over(self.session)

    def describe(self, job: Job) -> Submission:
        """Return what `launch` would start, after its checks; no Spark job is run."""
        make_profile(self.session, job.resources, job.workers)
        check_slots(self.session, job.workers, job.resources)
        later = "on which executors Spark starts the tasks, and what their Python has"
        place = "its own Spark job" if job.is_elastic else "a task of the barrier stage"
        return Submission((place,) * job.workers, later=(later,))

    @contextmanager
    def divide(
        self, job: Job, most: int, parallelism: int | None
    ) -> Iterator[Sequence[SparkLauncher]]:
        """Return launchers that take turns in the session's slots, one for each part of them."""
        workers = job.most_workers
        slots = check_slots(self.session, workers, job.resources)
        lanes = choose_lanes(slots, workers, most, parallelism)
        make_profile(self.session, job.resources, workers * lanes)
        yield [SparkLauncher(self.session, on_wait=LOGGER.info, lanes=lanes)] * lanes

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        """Run all workers of a job to completion, in one Spark job, or each in its own."""
        session = self.session
        profile = make_profile(session, job.resources, job.workers)
        slots = check_slots(session, job.workers, job.resources)
        job = _with_model_limit(session, job)
        if is_off():
            job = replace(job, resources=replace(job.resources, fork_server=None))
        ship_package(session)
        token = new_token()
        loopback = is_one_machine(session)
        with ExitStack() as stack:
            if self._on_wait:
                owner = session if is_connect(session) else session.sparkContext
                held = min(job.most_workers, slots)
                stack.enter_context(take_slots(owner, held, slots, self._on_wait))
            self._look()  # the caller may have given up meanwhile
            stack.enter_context(driver_python(session))
            check_hosts(session, job, datasets)
            run = partial(run_explained, session, check=self._look, on_wait=self._on_wait)
            addresses = driver_addresses(session)
            environment = stack.enter_context(
                sent_environment(session, job, addresses, run, on_event, profile)
            )
            cores = cores_of_task(session, job.most_workers * self._lanes, job.resources.cpus)
            of_stage = {"profile": profile} if profile else {}
            stack.enter_context(small_batches(session))
            if isinstance(job, TrainingJob) and job.is_elastic:
                task = Task(Member(job, files, None, token, None, loopback), cores, environment)
                return _train_elastically(session, job, task, of_stage, datasets, on_event)
            frame, source, counts = input_frame(session, job, datasets)
            patience = _MEET_SECONDS if environment is None else _INSTALL_SECONDS
            server = stack.enter_context(open_meeting(session, token, job, patience))
            if job.is_observed and not server.address:
                raise ClusterError(NO_OBSERVING)
            member = Member(job, files, source, token, server.address or None, loopback, counts)
            task = Task(member, cores, environment)
            size = sum(map(len, files.values()))
            plan = ask(
                session,
                "a plan",
                lambda: frame.mapInArrow(task, SCHEMA, barrier=True, **of_stage),
                size,
            )
            return self._run_stage(job, plan, server, on_event, datasets)

    def _run_stage(
        self, job: Job, plan: Any, server: MeetingServer, on_event: Emit, datasets: DataSets
    ) -> Outcome:
        """Run the barrier stage of a plan, and return what its tasks and their workers report."""
        session, rows = self.session, list[Any]()

        def watch() -> dict[int, str] | None:
            if not stage.is_over:
                stage.look()
                return None
            rows.extend(stage.result())
            if not rows:
                raise _explain_no_rows(datasets)
            server.drain(_DELIVERY_SECONDS)
            return {row["rank"]: row["report"] for row in rows if row["report"] is not None}

        explain = partial(explain_spark_error, session=session)
        collect = partial(collect_rows, plan)
        with quiet_log(session), running(session, collect, on_wait=self._on_wait) as stage:
            crew = follow_stage(job, server, on_event, watch, explain, self._look)
        reports, model = crew.conclude(), receive_model(server)
        pieces = [row for row in rows if row["model"] is not None]
        if pieces:  # the driver could not be reached
            model = pieces[0]["model_format"], b"".join(row["model"] for row in pieces)
        return Outcome(reports, model)


def _train_elastically(
    session: Any,
    job: TrainingJob,
    task: Task,
    stage_options: Mapping[str, Any],
    datasets: DataSets,
    on_event: Emit,
) -> Outcome:
    """Run elastic training; ``task`` has what its workers have in common, except their rows."""
    frame, source, _ = input_frame(session, replace(job, workers=1), datasets)
    way = TaskWay(
        session,
        frame,
        replace(task, member=replace(task.member, source=source)),
        stage_options,
        partial(open_meeting, session, task.member.token, replace(job, workers=1)),
        partial(_explain_no_rows, datasets),
        compares_rows=isinstance(source, RowsOfFrame),
        inherit=remember_properties(session),
    )
    with quiet_log(session):
        return run_on_hosts(way, job, {}, on_event, job.most_workers, SET_PYSPARK_PYTHON)


def launcher_of(target: Any) -> SparkLauncher | None:
    """Return a launcher if ``target`` is a ``SparkSession``, classic or Connect."""
    return SparkLauncher(target) if is_session(target) else None


def _explain_no_rows(datasets: Mapping[str, Any]) -> InputError | ClusterError:
    """Return the error for a Spark job without result rows.

    Spark does not start a task for a DataFrame that it knows is empty, and it does not always
    report that it ran out of memory.
    """
    for name, data in datasets.items():
        if isinstance(data, DataFrameRows) and run_watched(
            data.frame.sparkSession, data.frame.isEmpty
        ):
            return InputError(f"`{argument_of(name)}` has no rows")
    return ClusterError(
        "Spark ran the workers, but did not deliver their results: usually its driver has too "
        "little memory. Raise spark.driver.memory, or set `uri` of `model_options`"
    )


def _with_model_limit(session: Any, job: Job) -> Job:
    """Return the job, limited to the model size that the driver's setting lets Spark return."""
    if not isinstance(job, TrainingJob):
        return job
    limit = read_setting(session, "spark.driver.maxResultSize") or "1g"
    known = re.fullmatch(r"(\d+)([kmgtp]?)b?", limit.strip().lower())
    if known is None or int(known[1]) == 0:  # 0: no limit
        return job
    most = int(known[1]) << 10 * " kmgtp".index(known[2] or " ")
    return replace(job, model_limit=min(job.model_limit, int(most * _RESULT_SHARE)))


def check_hosts(session: Any, job: Job, datasets: Mapping[str, Any]) -> None:
    """Raise an error if rows would have to move between hosts that cannot reach each other."""
    if datasets and job.workers > 1 and not is_one_machine(session):
        check_network(session, job.workers)


def input_frame(
    session: Any, job: Job, datasets: Mapping[str, Any]
) -> tuple[Any, RowsOfFrame | Blobs | None, Counts]:
    """Return a DataFrame with one partition per worker, its reader, and known numbers of rows."""
    if not datasets:
        numbers = ask(session, "a plan", lambda: session.range(0, job.workers, 1, job.workers))
        return numbers, None, {}
    kinds = {isinstance(data, DataFrameRows) for data in datasets.values()}
    if len(kinds) > 1:
        raise InputError(
            f"`data` and `validation_data` must each be a {term('Spark DataFrame')}, or both be "
            "arrays; files can be combined with either"
        )
    if kinds == {True}:
        _check_partitions(session, job, list(datasets.values()))
        return *ask(session, "a plan", lambda: _frame_of_rows(job, datasets)), {}
    return _frame_of_blobs(session, job, datasets)


def _frame_of_rows(job: Job, datasets: Mapping[str, DataFrameRows]) -> tuple[Any, RowsOfFrame]:
    source = RowsOfFrame({name: data.column_groups for name, data in datasets.items()})
    frames = [data.frame for data in datasets.values()]
    frame = frames[0]
    if len(frames) > 1:
        marked = [f.selectExpr("*", f"{place} AS {SET_COLUMN}") for place, f in enumerate(frames)]
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


def _check_partitions(session: Any, job: Job, datasets: Sequence[DataFrameRows]) -> None:
    if datasets[0].spec.repartition:
        return
    if len(datasets) > 1:
        raise InputError(
            f"{setting(repartition=False)} supports only one {term('DataFrame')}, but "
            "`validation_data` is a second one: pass it as files, or leave out `repartition`"
        )
    if is_connect(session):  # does not know the number in advance; the tasks check it
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
) -> tuple[Any, Blobs, Counts]:
    keys = _partition_keys(session, job.workers)
    to_all = ("train",) if job.shuffles_globally else ()
    counts = count_rows_to_send(datasets, job.workers)
    sent = count_rows_to_send(datasets, job.workers, to_all)
    rows = list(pack_blobs(datasets, keys, to_all))

    def send() -> Any:
        if is_connect(session):
            frame = session.createDataFrame(rows, BLOB_SCHEMA)
        else:
            sliced = session.sparkContext.parallelize(rows, len(rows))
            frame = session.createDataFrame(sliced, BLOB_SCHEMA)
        return frame.repartition(job.workers, "key")

    size = sum(len(value) for row in rows for value in row if isinstance(value, bytes))
    frame = ask(session, f"a {term('DataFrame')} of the rows", send, size)
    return frame, Blobs(describe_layout(datasets), sent), counts


def _partition_keys(session: Any, workers: int) -> list[int]:
    """Return a key for each rank that Spark's hash partitioning assigns to the rank's partition."""
    found = _KEYS.get(workers, {})
    candidates = 32 * workers
    while len(found) < workers:
        places = partial(_places, session, candidates, workers)
        found = {row["place"]: row["id"] for row in run_watched(session, places)}
        candidates *= 4
    _KEYS[workers] = found
    return [found[rank] for rank in range(workers)]


def _places(session: Any, candidates: int, workers: int) -> list[Any]:
    ids = session.range(candidates)
    return list(ids.selectExpr("id", f"pmod(hash(id), {workers}) AS place").collect())


def driver_addresses(session: Any) -> tuple[str | None, str | None]:
    """Return the address on which the driver listens, and the one at which executors reach it.

    In a container or behind NAT, the two differ; Spark's settings contain both. Over Connect, it is
    the address on the route to the server.
    """
    if is_connect(session):
        return own_address(session.client.host), None
    if is_one_machine(session):
        return "127.0.0.1", None
    host = (read_setting(session, "spark.driver.host") or "").strip("[]") or None
    bound = (read_setting(session, "spark.driver.bindAddress") or "").strip("[]") or None
    return bound or host, host


def open_meeting(session: Any, token: str, job: Job, patience: float = math.inf) -> MeetingServer:
    """Return the server at which the workers rendezvous, in this process.

    With a finite ``patience``, they can also meet elsewhere: then the server has no address if
    executors cannot reach this process.

    Raises
    ------
    ClusterError
        The driver cannot listen at the address in Spark's settings.
    """
    host, announced = driver_addresses(session)
    silence = find_silence(job.timeout)
    listen = partial(
        MeetingServer, token=token, workers=job.workers, patience=patience, silence=silence
    )
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

    Parameters
    ----------
    watch
        Called repeatedly. It returns None while the stage is running, and then the reports by rank.
        It raises `ClusterError` if the stage cannot continue, or Spark's error if it has failed.
    explain
        Returns the error for Spark's, if no worker reports the cause.
    check
        As in `Crew.follow`.
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
                host = host_of(rank, server, UNKNOWN_HOST)
                crew.hear(read_report(texts.get(rank), rank, host))

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


def host_of(rank: int, server: MeetingServer, unknown: str) -> str:
    """Return the host that a worker reported when it joined the others."""
    said = server.messages.get(rank)
    with suppress(ClusterError):
        return read_arrival(said, f"worker {rank}").host if said else unknown
    return unknown


def collect_rows(result: Any) -> list[Any]:
    """Return all rows: as Arrow if this pyspark release supports it, to copy them less often."""
    if hasattr(result, "toArrow"):
        rows: list[Any] = result.toArrow().to_pylist()
        return rows
    return list(result.collect())
