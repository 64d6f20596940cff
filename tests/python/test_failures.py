"""Failures of a job are collected in one place, and the earliest is the cause."""

from __future__ import annotations

import time

import pytest

from pybackend.errors import Failure, WorkerFailedError
from pybackend.job.job import FunctionJob, Job, TrainingJob
from pybackend.job.messages import Event, Failed, Note
from pybackend.job.options import ParameterServer
from pybackend.job.report import WorkerReport
from pybackend.launchers.failures import Failures, find_fatal
from pybackend.launchers.spark.task_failure import fail_task, find_failures


def failure(rank: int, kind: str = "KeyError", time: float = 0.0) -> Failure:
    return Failure(rank, "10.0.0.1", kind, f"reason {rank}", time=time)


def test_events_pass_and_failures_are_kept() -> None:
    events: list[Event] = []
    failures = Failures(events.append)
    failures(Note("hello"))
    failures.raise_any()
    assert not failures
    failures(Failed(failure(1, time=5.0)))
    failures.add([failure(0, time=3.0), failure(2, "PeerLostError", time=1.0)])
    assert events == [Note("hello")]
    with pytest.raises(WorkerFailedError) as caught:
        failures.raise_any()
    assert caught.value.rank == 0
    assert [other.rank for other in caught.value.others] == [1, 2]


@pytest.mark.parametrize(
    ("kinds", "seconds"),
    [
        (["ProcessDied"], 3),
        (["KeyError", "PeerLostError"], 3),
        (["PeerLostError"], 5),
        (["PeerLostError", "UnavailableError"], 5),
    ],
)
def test_others_have_longer_to_report_if_the_cause_is_not_known(
    kinds: list[str], seconds: int
) -> None:
    reports = [WorkerReport(n, "a", 1, failure=failure(n, kind)) for n, kind in enumerate(kinds)]
    began = time.monotonic()
    failures = Failures(lambda event: None)
    deadline = failures.deadline(FunctionJob(3), reports)
    assert seconds <= deadline - began <= seconds + (time.monotonic() - began)
    later = [*reports, WorkerReport(2, "a", 1, failure=failure(2, "ValueError"))]
    assert failures.deadline(FunctionJob(3), later) <= deadline


ROLES = (("chief", 1), ("worker", 2), ("ps", 1))
ASYNCHRONOUS = TrainingJob(4, exchange=ParameterServer(), roles=ROLES)


@pytest.mark.parametrize(
    ("job", "kinds", "fatal"),
    [
        (ASYNCHRONOUS, {2: "ProcessDied"}, []),
        (ASYNCHRONOUS, {2: "ValueError"}, [2]),
        (ASYNCHRONOUS, {1: "ProcessDied", 2: "WorkerStalled"}, [1, 2]),
        (ASYNCHRONOUS, {3: "ProcessDied"}, [3]),
        (ASYNCHRONOUS, {0: "PeerLostError", 2: "ProcessDied", 3: "ProcessDied"}, [0, 3]),
        (ASYNCHRONOUS, {0: "PeerLostError", 2: "ProcessDied"}, [0, 2]),
        (TrainingJob(4), {2: "ProcessDied"}, [2]),
    ],
    ids=["lost", "failed", "all", "server", "both", "at the start", "synchronous"],
)
def test_servers_go_on_without_a_worker_that_is_lost(
    job: Job, kinds: dict[int, str], fatal: list[int]
) -> None:
    found = {rank: failure(rank, kind) for rank, kind in kinds.items()}
    reports = [WorkerReport(rank, "10.0.0.1", 1, failure=found.get(rank)) for rank in range(4)]
    assert [failure.rank for failure in find_fatal(job, reports)] == fatal


def test_the_driver_reads_a_failure_that_was_not_sent_from_sparks_message() -> None:
    with pytest.raises(RuntimeError, match="worker 3: KeyError: reason 3") as caught:
        fail_task(failure(3), lambda event: False)
    spark = f"Job aborted: {caught.value}\n\tat org.apache...\nCaused by: {caught.value}"
    assert find_failures(spark) == [failure(3)]
    assert find_failures(spark.replace("~tfdist~", "~tfdist~AAA", 1)) == [failure(3)]
    assert find_failures(spark.replace("~tfdist~ey", "~tfdist~AA")) == []


def test_a_failure_that_was_sent_is_not_repeated() -> None:
    sent: list[Event] = []

    def send(event: Event) -> bool:
        sent.append(event)
        return True

    with pytest.raises(RuntimeError) as caught:
        fail_task(failure(3), send)
    assert sent == [Failed(failure(3))]
    assert find_failures(str(caught.value)) == []


def test_a_lost_executor_is_a_failure_of_its_worker() -> None:
    message = (
        "Could not recover from a failed barrier ResultStage. Most recent failure reason: Stage "
        "failed because barrier task ResultTask(4, 2) finished unsuccessfully.\n"
        "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) "
        "Reason: Command exited with code 137"
    )
    (found,) = find_failures(message)
    assert (found.rank, found.exception_type) == (2, "ExecutorLost")
    assert "code 137" in found.message


def test_a_task_whose_python_has_died_is_a_failure_of_its_worker() -> None:
    message = (
        "Could not recover from a failed barrier ResultStage. Most recent failure reason: Stage "
        "failed because barrier task ResultTask(0, 1) finished unsuccessfully.\n"
        "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider"
    )
    (found,) = find_failures(message)
    assert (found.rank, found.exception_type) == (1, "ProcessDied")
