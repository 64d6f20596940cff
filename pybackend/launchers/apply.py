"""Workers in the tasks of a stage that sparklyr runs, for functions written in R.

sparklyr's ``spark_apply(barrier = TRUE)`` starts R on the executors. R has no part of Spark's
barrier but the addresses: so the workers meet at the driver (`pybackend.meeting`), and what they
report comes the same way.
"""

from __future__ import annotations

import json
import queue
import re
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from pybackend.data.text import TEXT_SCHEMA, lines_of
from pybackend.errors import ClusterError, InputError, WorkerFailedError
from pybackend.job import Job
from pybackend.launchers.apply_task import MODEL, REPORT, TASK
from pybackend.launchers.child import Emit
from pybackend.launchers.outcome import Outcome
from pybackend.launchers.shipping import package_sources, ship_package
from pybackend.launchers.slots import check_slots, is_one_machine, setting
from pybackend.launchers.spark import check_hosts, input_frame
from pybackend.launchers.spark_job import ClassicJob, IdleWatch
from pybackend.launchers.spark_task import Task
from pybackend.meeting import MeetingServer
from pybackend.rendezvous import new_token
from pybackend.result import Failure, WorkerReport, root_cause_first

# All tasks of a barrier stage start together: this is the time for Python to start and read rows.
_MEET_SECONDS = 600.0
_DRAIN_SECONDS = 60.0
_CAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class SparklyrWorkers:
    """In place of a session: sparklyr starts the workers, and each is R with Python embedded.

    Attributes
    ----------
    session
        The PySpark session joined to sparklyr's JVM.
    run_stage
        A function of R, called as ``run_stage(view, archive, group, cores)`` with the name of a
        temporary view, the path of the workers' archive, a name for the Spark job, and the cores of
        a task. It returns when the stage has ended.
    examine
        A function of R, called as ``examine(workers, driver)`` after a stage that failed before its
        workers could tell why; it runs tasks that look, and returns what they miss as texts.
    """

    session: Any
    run_stage: Callable[[str, str, str, int], Any]
    examine: Callable[[int, str], Any]


def launch(
    workers: SparklyrWorkers,
    job: Job,
    files: Mapping[str, bytes],
    datasets: Mapping[str, Any],
    on_event: Emit,
) -> Outcome:
    """Run a job in one stage of sparklyr's ``spark_apply(barrier = TRUE)``.

    Parameters and errors are those of `pybackend.launchers.spark.launch`, but ``on_event`` is
    called from a thread, as R has this one.
    """
    session = workers.session
    check_slots(session, job.workers)
    ship_package(session)
    token = new_token()
    loopback = is_one_machine(session)
    host = "127.0.0.1" if loopback else str(setting(session, "spark.driver.host"))
    check_hosts(session, job, datasets)
    with ExitStack() as stack:
        frame, source = input_frame(session, job, datasets)
        meeting = stack.enter_context(MeetingServer(host, token, job.workers))
        task = Task(job, files, source, token, meeting.address, loopback)
        archive = stack.enter_context(_archive(task))
        view = stack.enter_context(_view(session, frame.mapInArrow(lines_of, TEXT_SCHEMA)))
        spark_job = ClassicJob(session)
        watch = stack.enter_context(_Watch(spark_job, meeting, on_event))
        error = None
        cores = int(setting(session, "spark.task.cpus") or 1)
        try:
            workers.run_stage(view, str(archive), spark_job.group, cores)
        except Exception as raised:
            error = raised
        except BaseException:  # Ctrl-C
            spark_job.cancel()
            raise
        if error is None:
            meeting.drain(_DRAIN_SECONDS)
        else:  # what the failed worker has sent may still be on its way
            watch.wait_for_failure(_CAUSE_SECONDS)
        watch.stop()
        if error is not None and watch.is_silent() and meeting.missing()[0]:
            raise _explained(error, meeting, _missed(workers, job, meeting)) from error
        watch.raise_failure()
        if error is not None:
            raise _explained(error, meeting, []) from error
        return _outcome(meeting, job.workers)


@contextmanager
def _archive(task: Task) -> Iterator[Path]:
    """This package and the task in one file, in a folder that goes with the Spark application."""
    from pyspark import SparkFiles

    root = SparkFiles.getRootDirectory()
    with tempfile.TemporaryDirectory(prefix="tfdist-", dir=root) as folder:
        path = Path(folder) / "task.zip"
        with zipfile.ZipFile(path, "w") as packed:
            for name, content in package_sources().items():
                packed.writestr(name, content)
            packed.writestr(TASK, cloudpickle.dumps(task))
        yield path


@contextmanager
def _view(session: Any, frame: Any) -> Iterator[str]:
    name = f"tfdist_{new_token()[:12]}"
    frame.createOrReplaceTempView(name)
    try:
        yield name
    finally:
        session.catalog.dropTempView(name)


class _Watch:
    """Passes on events while R waits for Spark, and cancels a job that cannot go on."""

    def __init__(self, job: ClassicJob, meeting: MeetingServer, on_event: Emit) -> None:
        self.failures: dict[int, Failure] = {}
        self.trouble: ClusterError | None = None
        self._job = job
        self._meeting = meeting
        self._on_event = on_event
        self._stopped = threading.Event()
        self._has_failed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_silent(self) -> bool:
        """Whether nothing tells yet why the job failed."""
        return not self.failures and self.trouble is None

    def raise_failure(self) -> None:
        """Raise what the workers have told, or what was seen here."""
        if self.failures:
            raise WorkerFailedError(root_cause_first(list(self.failures.values())))
        if self.trouble is not None:
            raise self.trouble

    def wait_for_failure(self, seconds: float) -> None:
        """Wait until a worker has told its failure."""
        self._has_failed.wait(seconds)

    def stop(self) -> None:
        """Pass on what has come, and end."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        idle = IdleWatch(self._job)
        while not self._stopped.is_set() or not self._meeting.queue.empty():
            with suppress(queue.Empty):
                event = self._meeting.queue.get(timeout=0.1)
                if event["event"] == "failed":
                    self.failures[event["rank"]] = Failure.from_dict(event["failure"])
                    self._has_failed.set()
                else:
                    self._on_event(event)
            try:
                if self.trouble is None:
                    self._look(idle)
            except ClusterError as trouble:
                self.trouble = trouble
                self._job.cancel()

    def _look(self, idle: IdleWatch) -> None:
        """`ClusterError` where the workers will not meet any more."""
        missing, seconds = self._meeting.missing()
        if missing and seconds > _MEET_SECONDS:
            named = ", ".join(map(str, missing))
            raise ClusterError(
                f"worker {named} did not meet the others within {_MEET_SECONDS:.0f} s: see the "
                "logs of the executors, and whether all of them reach the driver at "
                f"{self._meeting.address}"
            )
        if missing:
            idle.look()


def _missed(workers: SparklyrWorkers, job: Job, meeting: MeetingServer) -> list[str]:
    """What the executors lack to run workers at all."""
    try:
        found = workers.examine(job.workers, meeting.address)
    except Exception as error:
        return [f"the executors cannot be examined either: {error}".splitlines()[0]]
    return [found] if isinstance(found, str) else list(found)


def _explained(error: Exception, meeting: MeetingServer, missed: list[str]) -> ClusterError:
    """A stage that failed before its workers could tell it themselves."""
    text = str(error)
    causes = re.findall(r"terminated unexpectedly: (.*)", text)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("\tat ")]
    reasons = missed or causes[-1:] or lines[:1]
    return ClusterError(
        f"sparklyr could not run the workers: {'; '.join(reasons)}\n\n"
        "What to do: executors need R with the package reticulate, and Python with TensorFlow; "
        f"and they must reach the driver at {meeting.address}. "
        "`tfdist_sitrep(sc)` shows what each of them has.\n\n"
        "sparklyr's message:\n" + "\n".join(lines)[:3000]
    )


def _outcome(meeting: MeetingServer, workers: int) -> Outcome:
    texts = [meeting.result(rank, REPORT) for rank in range(workers)]
    if not any(texts):  # Spark starts no task for a DataFrame that it knows to be empty
        raise InputError("`data` has no rows")
    absent = [rank for rank, text in enumerate(texts) if text is None]
    if absent:
        raise ClusterError(
            f"worker {', '.join(map(str, absent))} has ended without a report: see the logs of the "
            "executors"
        )
    reports = [WorkerReport.from_dict(json.loads(text)) for text in texts if text is not None]
    found = ((kind, meeting.result(0, MODEL + kind)) for kind in ("h5", "keras"))
    models = [(kind, content) for kind, content in found if content is not None]
    return Outcome(reports, models[0] if models else None)
