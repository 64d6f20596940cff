"""Launcher of workers in the tasks of a stage that sparklyr runs, for functions written in R.

sparklyr's ``spark_apply(barrier = TRUE)`` starts R on the executors. All that R receives from
Spark's barrier is the addresses. So the workers rendezvous at the driver (`net.meeting`), and send
their reports the same way.
"""

from __future__ import annotations

import math
import re
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from pybackend.core.data.text import TEXT_SCHEMA, encode_lines
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Emit, Event
from pybackend.core.job.report import WorkerReport
from pybackend.core.launchers.base import DataSets, Files, Outcome, reject_environment
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.package_files import package_files
from pybackend.core.launchers.remote.task import REPORT, TASK, receive_model
from pybackend.core.launchers.spark.barrier import (
    check_hosts,
    follow_stage,
    input_frame,
    open_meeting,
)
from pybackend.core.launchers.spark.jobs import ClassicJob, IdleWatch, give_up_after, run_watched
from pybackend.core.launchers.spark.session import ask, is_one_machine, read_version, ship_package
from pybackend.core.launchers.spark.slots import check_allotment, check_slots, cores_of_task
from pybackend.core.net.authentication import new_token
from pybackend.core.net.liveness import settle
from pybackend.core.net.meeting import MeetingServer

# Time for Python to start and read rows; all tasks of a barrier stage start together.
_MEET_SECONDS = 600.0
_DRAIN_SECONDS = 60.0
# From Spark 4.3 on, sparklyr's R workers load this class, and Spark does not include it.
_PROTOBUF = "com.google.protobuf.MessageOrBuilder"
_EXAMINE_SECONDS = 60.0


@dataclass(frozen=True)
class SparklyrWorkers:
    """Launcher whose workers sparklyr starts; each worker is R with Python embedded.

    Attributes
    ----------
    session
        The PySpark session attached to sparklyr's JVM.
    run_stage
        An R function, called as ``run_stage(view, archive, group, cores)`` with the name of a
        temporary view, the path of the workers' archive, a name for the Spark job, and the cores of
        a task. It returns when the stage has ended.
    examine
        An R function, called as ``examine(view, driver, group)`` after a stage that failed before
        its workers could report why. It runs tasks that check the executors, and returns texts
        that name what is missing.
    """

    where: ClassVar[str] = "R processes in the tasks of a Spark job"
    is_here: ClassVar[bool] = False
    workers: ClassVar[None] = None
    why_fixed: ClassVar[str] = (
        "Spark's barrier mode starts all tasks of a stage together and cannot replace one"
    )
    why_bound: ClassVar[str] = (
        "sparklyr's connection belongs to this R session, and its jobs end with it: run the script "
        "on the cluster, in a process that keeps running"
    )
    session: Any
    run_stage: Callable[[str, str, str, int], Any]
    examine: Callable[[str, str, str], Any]

    def check(self, job: Job) -> None:
        """Reject an environment: R needs packages of its own on the executors."""
        reject_environment(
            job,
            "functions written in R run in the R of the executors, which needs reticulate and "
            "a Python with TensorFlow there. Pass a model and data that are not R functions",
        )

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        """Run all workers of a job; ``on_event`` is called from a thread, as R uses this one."""
        session = self.session
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
        ship_package(session)
        token = new_token()
        loopback = is_one_machine(session)
        check_hosts(session, job, datasets)
        with ExitStack() as stack:
            frame, source, counts = input_frame(session, job, datasets)
            meeting = stack.enter_context(open_meeting(session, token, job))
            member = Member(job, files, source, token, meeting.address, loopback, counts)
            archive = stack.enter_context(_archive(session, member))
            lines = ask(session, "a plan", lambda: frame.mapInArrow(encode_lines, TEXT_SCHEMA))
            view = stack.enter_context(_view(session, lines))
            spark_job, cores = ClassicJob(session), cores_of_task(session, job.workers)
            stage = RStage(job, spark_job, meeting, bool(datasets))
            followed = stage.follow(on_event)
            try:
                stage.run(partial(self.run_stage, view, str(archive), spark_job.group, cores))
                return Outcome(followed.result(), receive_model(meeting))
            except _StageError as error:
                missed = _find_missing(self, job, meeting) if meeting.missing()[0] else []
                raise _explain(str(error), meeting.address, missed) from error


def _start_cancel(job: ClassicJob) -> None:
    """Cancel without waiting: if the driver does not answer, the call takes half a minute."""
    threading.Thread(target=_cancel, args=(job,), daemon=True).start()


def _cancel(job: ClassicJob) -> None:
    """Cancel repeatedly, because a job that is still being submitted cannot be cancelled yet."""
    for _ in range(5):
        with suppress(Exception):  # the session may have stopped, which ends the job too
            job.cancel()
        time.sleep(1)


@contextmanager
def _archive(session: Any, member: Member) -> Iterator[Path]:
    """Yield an archive of this package and the member, in the Spark application's folder."""
    from pyspark import SparkFiles

    root = ask(session, "its folder for files", SparkFiles.getRootDirectory)
    with tempfile.TemporaryDirectory(prefix="tfdist-", dir=root) as folder:
        path = Path(folder) / "task.zip"
        with zipfile.ZipFile(path, "w") as packed:
            for name, content in package_files().items():
                packed.writestr(name, content)
            packed.writestr(TASK, cloudpickle.dumps(member))
        yield path


@contextmanager
def _view(session: Any, frame: Any) -> Iterator[str]:
    name = f"tfdist_{new_token()[:12]}"
    ask(session, "a view", lambda: frame.createOrReplaceTempView(name))
    try:
        yield name
    finally:
        with suppress(Exception):  # a stopped session has no views
            ask(session, "the end of a view", lambda: session.catalog.dropTempView(name))


class _StageError(ClusterError):
    """A stage has failed before a worker reported why."""


class RStage:
    """The stage of a Spark job that R runs on this thread, while another one follows its workers.

    ``has_data`` is whether workers get rows: Spark starts no task for what it knows to be empty.
    """

    def __init__(
        self, job: Job, spark_job: ClassicJob, meeting: MeetingServer, has_data: bool
    ) -> None:
        self._job = job
        self._spark_job = spark_job
        self._meeting = meeting
        self._has_data = has_data
        self._end: Future[object] = Future()
        self._idle = IdleWatch(spark_job)
        # When a task was first seen to run.
        self._busy_since = math.inf

    def run(self, call: Callable[[], object]) -> None:
        """Run the stage; only an error that R did not raise, such as Ctrl-C, is raised."""
        settle(self._end, call)
        error = self._end.exception()
        if error is not None and not isinstance(error, Exception):
            _start_cancel(self._spark_job)
            raise error

    def follow(self, on_event: Emit) -> Future[list[WorkerReport]]:
        """Follow the workers on a thread; if one fails first, cancel the stage."""

        def pass_on(event: Event) -> None:
            with suppress(Exception):  # a closed console must not lose later events
                on_event(event)

        def follow() -> list[WorkerReport]:
            try:
                parts = self._job, self._meeting, pass_on, self._watch, _StageError
                return follow_stage(*parts).conclude()
            finally:
                if not self._end.done():
                    _start_cancel(self._spark_job)

        followed: Future[list[WorkerReport]] = Future()
        threading.Thread(target=settle, args=(followed, follow), daemon=True).start()
        return followed

    def _watch(self) -> dict[int, bytes | None] | None:
        """Return the reports of a stage that has ended; cancel one whose workers cannot connect."""
        if not self._end.done():
            try:
                self._look()
            except ClusterError:
                _start_cancel(self._spark_job)
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
        absent = [rank for rank, text in texts.items() if text is None]
        if absent:
            raise ClusterError(
                f"worker {', '.join(map(str, absent))} ended without a report: see the logs of the "
                "executors"
            )
        return texts


def _find_missing(workers: SparklyrWorkers, job: Job, meeting: MeetingServer) -> list[str]:
    """Return what the executors lack to run workers, within a time limit."""
    session = workers.session
    examination = ClassicJob(session)
    limit = threading.Timer(_EXAMINE_SECONDS, _cancel, (examination,))
    limit.daemon = True
    limit.start()
    try:
        numbers = ask(session, "a plan", lambda: session.range(0, job.workers, 1, job.workers))
        with _view(session, numbers) as view:
            found = workers.examine(view, meeting.address, examination.group)
    except Exception as error:
        if _is_without_protobuf(session, job.workers):
            return [f"the executors have no class {_PROTOBUF}"]
        return [f"the executors cannot be examined either: {error}".splitlines()[0]]
    finally:
        limit.cancel()
    return [found] if isinstance(found, str) else list(found)


def _is_without_protobuf(session: Any, workers: int) -> bool:
    """Return whether sparklyr's R cannot start for lack of a class; only executors log that."""
    load = f"reflect('java.lang.Class', 'forName', '{_PROTOBUF}')"
    check = give_up_after(_EXAMINE_SECONDS, ClusterError("no executor answered"))

    def look() -> None:
        session.range(0, workers, 1, workers).selectExpr(load).collect()

    try:
        if read_version(session) >= (4, 3):
            run_watched(session, look, check, idle_seconds=math.inf)
    except Exception as error:
        return f"ClassNotFoundException: {_PROTOBUF}" in str(error)
    return False


def _unwrap(error: Exception) -> str:
    """Return sparklyr's message, which wraps Spark's, as one line without Java's frames."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("at "))


def _explain(text: str, address: str, missed: list[str]) -> ClusterError:
    """Return the error for a stage that failed before a worker reported why."""
    headline = re.sub(r" (Run `sparklyr::spark_last_error|Driver stacktrace).*", "", text)
    headline = "; ".join(missed) or headline
    advice = "see the executors' logs in the Spark web interface"
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
