"""sparklyr: PySpark in its JVM, and workers for functions written in R in a stage that it runs.

sparklyr starts a Py4J server inside its own JVM, with a port and a secret; PySpark then uses that
JVM's SparkContext, so that Spark tables and temporary views are available without copying.

sparklyr's ``spark_apply(barrier = TRUE)`` starts R on the executors. All that R receives from
Spark's barrier is the addresses. So the workers rendezvous at the driver (`net.meeting`), and send
their reports the same way.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from pybackend.core.data.spark_rows import TEXT_SCHEMA, encode_lines
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Emit, Event
from pybackend.core.job.report import WorkerReport
from pybackend.core.launchers.base import DataSets, Files, Outcome, reject_environment
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.package_files import pack_package
from pybackend.core.launchers.remote.task import REPORT, TASK, receive_model
from pybackend.core.launchers.spark import sessions, stage
from pybackend.core.launchers.spark.explain import SEE_LOGS
from pybackend.core.launchers.spark.slots import check_allotment, check_slots, cores_of_task
from pybackend.core.launchers.spark.spark_jobs import (
    ClassicJob,
    IdleWatch,
    give_up_after,
    run_watched,
    start_cancel,
)
from pybackend.core.net.authentication import new_token
from pybackend.core.net.liveness import settle
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.words import either

_FORGOTTEN = ("pyspark", "pybackend.ml", "pybackend.tfos")


@dataclass(frozen=True)
class _Attached:
    """Session of a JVM, and the modules of PySpark that hold on to that JVM while not in use."""

    session: Any
    modules: dict[str, ModuleType] = field(default_factory=dict)


# By the port of the JVM.
_attached: dict[int, _Attached] = {}
# Port of the JVM whose modules are loaded.
_loaded: int | None = None


def attach_spark(
    port: int, secret: str, spark_home: str | None = None, python: str | None = None
) -> Any:
    """Return the PySpark session of the JVM whose ``Py4JServer`` listens on a local port.

    Each JVM has its own PySpark modules, so sparklyr may have several connections. ``spark_home``
    is Spark's folder, if it differs from that of the installed pyspark. Executors run ``python``;
    None: the value of PYSPARK_PYTHON. `ClusterError` if this process started a Spark application
    itself, pyspark is not installed, or the JVM does not answer.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ClusterError(
            "pyspark is not installed for this Python: install the pyspark version that matches "
            'your Spark, e.g. with install_tfdist(extras = c("cpu", "spark")) in R'
        )
    known = _attached.get(port)
    if known is not None and _is_alive(known.session):
        if _loaded != port:
            _load_pyspark(port, known.modules)
        return known.session
    _reject_foreign_session()
    _load_pyspark(port, {})
    for other in [other for other, one in _attached.items() if not _is_alive(one.session)]:
        del _attached[other]
    _attached[port] = _Attached(_attach(port, secret, spark_home, python))
    return _attached[port].session


def _attach(port: int, secret: str, spark_home: str | None, python: str | None) -> Any:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    # With these two variables PySpark joins a running JVM instead of starting one.
    variables = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    chosen = {"SPARK_HOME": spark_home, "PYSPARK_PYTHON": python}
    variables |= {name: value for name, value in chosen.items() if value}
    # Set by an earlier Connect session of this process; PySpark would start another one.
    os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)
    _disconnect_quietly()

    def join() -> Any:
        gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
        spark = gateway.jvm.org.apache.spark
        context = spark.api.java.JavaSparkContext.fromSparkContext(spark.SparkContext.getOrCreate())
        pairs = context.getConf().getAll()
        settings = [(pair.productElement(0), pair.productElement(1)) for pair in pairs]
        conf = SparkConf(loadDefaults=False).setAll(settings)
        SparkContext(gateway=gateway, jsc=context, conf=conf)
        return SparkSession.builder.getOrCreate()

    with _environment(variables):
        return sessions.ask(None, "its session", join)


def _is_alive(session: Any) -> bool:
    from py4j.protocol import Py4JError

    # py4j logs the broken connection, which is expected here, as an error.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return bool(sessions.ask(session, "its name", lambda: session.sparkContext.applicationId))
    except (ClusterError, Py4JError, OSError, AttributeError):  # its JVM exited, or it was stopped
        return False
    finally:
        logging.disable(before)


def _disconnect_quietly() -> None:
    """Hide the traceback that PySpark prints when sparklyr disconnects."""
    from pyspark import accumulators

    # PySpark's accumulator server reports the end of the JVM as an error, but here it is normal.
    # Its name before pyspark 4, and from then on.
    names = ("AccumulatorServer", "AccumulatorTCPServer")
    server = next(getattr(accumulators, name) for name in names if hasattr(accumulators, name))
    report = server.handle_error

    def handle_error(self: Any, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (EOFError, OSError)):
            report(self, request, client_address)

    server.handle_error = handle_error


def _reject_foreign_session() -> None:
    from pyspark.sql import SparkSession

    try:
        # Not getActiveSession(): it only returns the session of its own thread.
        session = sessions.ask(None, "its session", SparkSession.active)
    except Exception:  # raised for a session whose JVM exited
        return
    if session is None or not _is_alive(session):
        return
    context, own = session.sparkContext, _attached.get(_loaded or 0)
    if own is not None and context is own.session.sparkContext:
        return
    raise ClusterError(
        f"Python started another Spark application ({context.applicationId}, master "
        f"{context.master}), not through sparklyr: pass its session instead, or stop it with its "
        f"{either('stop()', '`$stop()`')}"
    )


def _load_pyspark(port: int, modules: dict[str, ModuleType]) -> None:
    """Replace the loaded modules of PySpark by those of the JVM at a port; empty: load new ones."""
    global _loaded
    # PySpark holds on to the gateway of its first JVM. Objects of a JVM refer to its modules, so
    # they never use another JVM. Our modules with classes derived from PySpark's are replaced as
    # well.
    before = _attached[_loaded].modules if _loaded in _attached else {}
    for name in list(sys.modules):
        if any(name == one or name.startswith(f"{one}.") for one in _FORGOTTEN):
            before[name] = sys.modules.pop(name)
    sys.modules.update(modules)
    _loaded = port


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables temporarily: the secret must not reach other processes."""
    before = {name: os.environ[name] for name in variables.keys() & os.environ.keys()}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


# Time for Python to start and read rows; all tasks of a barrier stage start together.
_MEET_SECONDS = 600.0
_DRAIN_SECONDS = 60.0
# From Spark 4.3 on, sparklyr's R workers load this class, and Spark does not include it.
_PROTOBUF = "com.google.protobuf.MessageOrBuilder"
_EXAMINE_SECONDS = 60.0


@dataclass(frozen=True)
class SparklyrWorkers:
    """Launcher whose workers sparklyr starts; each worker is R with Python embedded.

    ``session`` is attached to sparklyr's JVM. ``run_stage`` and ``examine`` are R functions. The
    first is called as ``run_stage(view, archive, group, cores)`` with the name of a temporary view,
    the path of the workers' archive, a name for the Spark job, and the cores of a task; it returns
    when the stage has ended. ``examine(view, driver, group)`` is called after a stage that failed
    before its workers could report why: it runs tasks that check the executors, and returns texts
    that name what is missing.
    """

    where = "R processes in the tasks of a Spark job"
    is_here = False
    workers = None
    why_fixed = "Spark's barrier mode starts all tasks of a stage together and cannot replace one"
    why_bound = (
        "sparklyr's connection belongs to this R session, and its jobs end with it: run the script "
        "on the cluster, in a process that keeps running"
    )
    session: Any
    run_stage: Callable[[str, str, str, int], Any]
    examine: Callable[[str, str, str], Any]

    def check(self, job: Job) -> None:
        reject_environment(
            job,
            "functions written in R run in the R of the executors, which needs reticulate and "
            "a Python with TensorFlow there. Pass a model and data that are not R functions",
        )

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        """Run all workers of a job; ``on_event`` is called from a thread, as R uses this one."""
        session, token = self.session, new_token()
        if job.is_observed:
            raise InputError(
                "workers that sparklyr starts for functions written in R cannot be observed: "
                "spark_apply() blocks this R session until they end. Leave the observers out, or "
                "pass a model and data that are not R functions"
            )
        self.check(job)
        check_slots(session, job.workers)
        if job.resources.gpus:
            raise InputError(
                "sparklyr does not tell R about a task's GPUs: `gpus` is not supported for "
                "workers that sparklyr starts for functions written in R"
            )
        check_allotment(session, job.resources, job.workers)
        sessions.ship_package(session)
        loopback = sessions.is_one_machine(session)
        stage.check_hosts(session, job, datasets)
        with ExitStack() as stack:
            frame, source, counts = stage.input_frame(session, job, datasets)
            meeting = stack.enter_context(stage.open_meeting(session, token, job))
            member = Member(job, files, source, token, meeting.address, loopback, counts)
            archive = stack.enter_context(_archive(session, member))
            lines = sessions.map_in_arrow(frame, encode_lines, TEXT_SCHEMA)
            view = stack.enter_context(_view(session, lines))
            spark_job, cores = ClassicJob(session), cores_of_task(session, job.workers)
            r_stage = RStage(job, spark_job, meeting, bool(datasets))
            followed = r_stage.follow(on_event)
            try:
                r_stage.run(partial(self.run_stage, view, str(archive), spark_job.group, cores))
                return Outcome(followed.result(), receive_model(meeting))
            except _StageError as error:
                missed = _find_missing(self, job, meeting) if meeting.missing()[0] else []
                raise _explain(str(error), meeting.address, missed) from error


@contextmanager
def _archive(session: Any, member: Member) -> Iterator[Path]:
    """Yield an archive of this package and the member, in the Spark application's folder."""
    from pyspark import SparkFiles

    root = sessions.ask(session, "its folder for files", SparkFiles.getRootDirectory)
    with tempfile.TemporaryDirectory(prefix="tfdist-", dir=root) as folder:
        path = Path(folder) / "task.zip"
        path.write_bytes(pack_package())
        with zipfile.ZipFile(path, "a") as packed:
            packed.writestr(TASK, cloudpickle.dumps(member))
        yield path


@contextmanager
def _view(session: Any, frame: Any) -> Iterator[str]:
    name = f"tfdist_{new_token()[:12]}"
    sessions.ask(session, "a view", lambda: frame.createOrReplaceTempView(name))
    try:
        yield name
    finally:
        with suppress(Exception):  # a stopped session has no views
            sessions.ask(session, "the end of a view", lambda: session.catalog.dropTempView(name))


class _StageError(ClusterError):
    """A stage has failed before a worker reported why."""


class RStage:
    """The stage of a Spark job that R runs on this thread, while another one follows its workers.

    ``has_data`` is whether workers get rows: Spark starts no task for what it knows to be empty.
    """

    def __init__(
        self, job: Job, spark_job: ClassicJob, meeting: MeetingServer, has_data: bool
    ) -> None:
        self._job, self._spark_job, self._meeting = job, spark_job, meeting
        self._has_data, self._idle = has_data, IdleWatch(spark_job)
        self._end: Future[object] = Future()
        # When a task was first seen to run.
        self._busy_since = math.inf

    def run(self, call: Callable[[], object]) -> None:
        """Run the stage; only an error that R did not raise, such as Ctrl-C, is raised."""
        settle(self._end, call)
        error = self._end.exception()
        if error is not None and not isinstance(error, Exception):
            start_cancel(self._spark_job, Future())
            raise error

    def follow(self, on_event: Emit) -> Future[list[WorkerReport]]:
        """Follow the workers on a thread; if one fails first, cancel the stage."""

        def pass_on(event: Event) -> None:
            with suppress(Exception):  # a closed console must not lose later events
                on_event(event)

        def follow() -> list[WorkerReport]:
            try:
                parts = self._job, self._meeting, pass_on, self._watch, _StageError
                return stage.follow_stage(*parts).conclude()
            finally:
                if not self._end.done():
                    start_cancel(self._spark_job, self._end)

        followed: Future[list[WorkerReport]] = Future()
        threading.Thread(target=settle, args=(followed, follow), daemon=True).start()
        return followed

    def _watch(self) -> dict[int, bytes | None] | None:
        """Return the reports of a stage that has ended; cancel one whose workers cannot connect."""
        if not self._end.done():
            try:
                self._look()
            except ClusterError:
                start_cancel(self._spark_job, self._end)
                raise
            return None
        try:
            self._end.result()
        except Exception as error:
            raise RuntimeError(_unwrap(error)) from error
        self._meeting.drain(_DRAIN_SECONDS)
        return self._read_reports()

    def _look(self) -> None:
        missing, seconds = self._meeting.missing()
        if not missing:
            return
        if math.isinf(self._busy_since) and self._idle.is_busy:
            self._busy_since = time.monotonic()
        if max(seconds, time.monotonic() - self._busy_since) > _MEET_SECONDS:
            named = ", ".join(map(str, missing))
            raise ClusterError(
                f"worker {named} did not connect to the others within {_MEET_SECONDS:.0f} s: see "
                "the logs of the executors, and check whether all of them can reach the driver "
                f"at {self._meeting.address}"
            )
        self._idle.look()

    def _read_reports(self) -> dict[int, bytes | None]:
        texts = {rank: self._meeting.result(rank, REPORT) for rank in range(self._job.workers)}
        if not any(texts.values()) and self._has_data:
            raise InputError("`data` has no rows")
        if absent := ", ".join(str(rank) for rank, text in texts.items() if text is None):
            raise ClusterError(
                f"worker {absent} ended without a report: see the logs of the executors"
            )
        return texts


def _find_missing(workers: SparklyrWorkers, job: Job, meeting: MeetingServer) -> list[str]:
    """Return what the executors lack to run workers, within a time limit."""
    session = workers.session
    examination, outcome = ClassicJob(session), Future[Any]()
    limit = threading.Timer(_EXAMINE_SECONDS, start_cancel, (examination, outcome))
    limit.daemon = True
    limit.start()
    try:
        with _view(session, sessions.number_partitions(session, job.workers)) as view:
            found = workers.examine(view, meeting.address, examination.group)
    except Exception as error:
        if _is_without_protobuf(session, job.workers):
            return [f"the executors have no class {_PROTOBUF}"]
        return [f"the executors cannot be examined either: {error}".splitlines()[0]]
    finally:
        limit.cancel()
        outcome.set_result(None)
    return [found] if isinstance(found, str) else list(found)


def _is_without_protobuf(session: Any, workers: int) -> bool:
    """Return whether sparklyr's R cannot start for lack of a class; only executors log that."""
    load = f"reflect('java.lang.Class', 'forName', '{_PROTOBUF}')"
    check = give_up_after(_EXAMINE_SECONDS, ClusterError("no executor answered"))

    def look() -> None:
        session.range(0, workers, 1, workers).selectExpr(load).collect()

    try:
        if sessions.read_version(session) >= (4, 3):
            run_watched(session, look, check, idle_seconds=math.inf)
    except Exception as error:
        return f"ClassNotFoundException: {_PROTOBUF}" in str(error)
    return False


def _unwrap(error: Exception) -> str:
    """Return sparklyr's message, which wraps Spark's, as one line without Java's frames."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("at "))


def _explain(text: str, address: str, missed: list[str]) -> ClusterError:
    cut = re.sub(r" (Run `sparklyr::spark_last_error|Driver stacktrace).*", "", text)
    headline, advice = "; ".join(missed) or cut, SEE_LOGS
    if re.search("com[./]google[./]protobuf", " ".join([text, *missed])):
        advice = (
            "this release of Spark lacks a jar that sparklyr's R workers need: before "
            'spark_connect(), set config[["sparklyr.shell.driver-class-path"]] and '
            'config[["spark.executor.extraClassPath"]] to a protobuf.jar that every host has '
            "(Debian's package libprotobuf-java puts it at /usr/share/java/protobuf.jar)"
        )
    elif missed:
        advice = (
            "executors need R with the package reticulate, and Python with TensorFlow; and they "
            f"must be able to reach the driver at {address}. `tfdist_sitrep(sc)` shows what each "
            "of them has"
        )
    return ClusterError(
        f"sparklyr could not run the workers: {headline[:600]}\n\nWhat to do: {advice}\n\n"
        f"sparklyr's message:\n{text[:3000]}"
    )
