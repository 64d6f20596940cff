"""The workers of a call are followed in one place, and the earliest failure is the cause."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from pybackend.core.errors import ClusterError, Failure, WorkerFailedError
from pybackend.core.job.job import FunctionJob, Job, TrainingJob
from pybackend.core.job.messages import Begun, EpochEnded, Event, Failed, Note, StopTraining
from pybackend.core.job.report import WorkerReport
from pybackend.core.job.worker_options import ParameterServer
from pybackend.core.launchers import crew as crew_module
from pybackend.core.launchers.crew import Crew, find_fatal, take_all
from pybackend.core.launchers.spark.barrier_task import fail_task
from pybackend.core.launchers.spark.stage import find_failures

ROLES = (("chief", 1), ("worker", 2), ("ps", 1))
ASYNCHRONOUS = TrainingJob(4, exchange=ParameterServer(), roles=ROLES)


def failure(rank: int, kind: str = "KeyError", time: float = 0.0) -> Failure:
    return Failure(rank, "10.0.0.1", kind, f"reason {rank}", time=time)


def test_events_pass_and_the_first_cause_counts() -> None:
    events: list[Event] = []
    crew = Crew(FunctionJob(3), events.append)
    crew.hear(Note("hello"))
    crew.raise_any()
    assert not crew.has_failed
    crew.hear(Failed(failure(1, time=5.0)))
    crew.lose([failure(0, time=3.0), failure(2, "PeerLostError", time=1.0)])
    assert events == [Note("hello")]
    with pytest.raises(WorkerFailedError) as caught:
        crew.conclude()
    assert caught.value.rank == 0
    assert [other.rank for other in caught.value.others] == [1, 2]


def test_a_worker_knows_more_of_its_failure_than_the_cluster() -> None:
    crew = Crew(FunctionJob(3), lambda event: None, hosts="a")
    crew.lose([failure(1, "ExecutorLost")])
    crew.lose([failure(1, "HostLost")])
    assert crew.reports[1].failure == failure(1, "ExecutorLost")
    crew.hear(WorkerReport(1, "a", 7, failure=failure(1, "ValueError")))
    crew.hear(WorkerReport(0, "a", 6))
    assert crew.missing == [2]
    with pytest.raises(WorkerFailedError, match="failed: ValueError: reason 1") as caught:
        crew.conclude()
    (stopped,) = caught.value.others
    assert (stopped.rank, stopped.exception_type) == (2, "Stopped")


def test_events_that_arrive_without_a_pause_leave_time_to_look() -> None:
    events, taken = queue.Queue[int](), list[int]()
    events.put(0)
    events.put(1)

    def take(event: int) -> None:
        taken.append(event)
        events.put(event + 2)

    take_all(events, take, 0.0)
    assert taken == [0, 1]
    take_all(events, take, 0.0)
    assert taken == [0, 1, 2, 3]


def test_answers_go_to_the_worker_that_asked() -> None:
    sent: list[Any] = []
    crew = Crew(FunctionJob(2), lambda event: StopTraining(), lambda *what: sent.append(what))
    crew.hear(EpochEnded(1, 1, 0.1, {}, rank=1))
    assert sent == [(StopTraining(), 1)]


def test_workers_are_followed_until_the_first_cause_is_known(monkeypatch: Any) -> None:
    monkeypatch.setattr(crew_module, "CAUSE_SECONDS", 0.05)

    def look() -> None:
        raise ClusterError("no such partition")

    crew = Crew(FunctionJob(2), lambda event: None)
    with pytest.raises(ClusterError, match="no such partition"):
        crew.follow(time.sleep, look)
    said = iter([WorkerReport(0, "a", 1, failure=failure(0)), WorkerReport(1, "a", 1)])
    crew = Crew(FunctionJob(2), lambda event: None)
    crew.follow(lambda seconds: crew.hear(next(said)) if seconds else None, look)
    with pytest.raises(WorkerFailedError, match="KeyError: reason 0"):
        crew.conclude()
    crew = Crew(ASYNCHRONOUS, lambda event: None)
    crew.hear(Begun())
    crew.lose([failure(2, "ProcessDied")])  # training goes on without it
    with pytest.raises(ClusterError, match="no such partition"):
        crew.follow(time.sleep, look)
    crew = Crew(FunctionJob(2), lambda event: None)
    crew.follow(time.sleep, seconds=0.05)
    assert crew.missing == [0, 1]


def test_a_known_cause_ends_the_wait_for_others_that_the_cluster_has_ended() -> None:
    def look() -> None:
        raise ClusterError("the stage has ended")

    def listen(seconds: float) -> None:
        time.sleep(seconds)
        crew.lose([failure(1)])

    began, crew = time.monotonic(), Crew(FunctionJob(3), lambda event: None, ends_together=True)
    crew.lose([failure(0, "PeerLostError")])  # another worker's failure must have come first
    crew.follow(listen, look)
    assert time.monotonic() < began + 1
    with pytest.raises(WorkerFailedError, match="KeyError: reason 1"):
        crew.conclude()


def test_where_a_cluster_ends_all_workers_together_one_loss_ends_the_job() -> None:
    crew = Crew(ASYNCHRONOUS, lambda event: None, ends_together=True)
    crew.hear(Begun())
    crew.lose([failure(2, "ProcessDied")])
    with pytest.raises(WorkerFailedError, match="reason 2") as caught:
        crew.conclude()
    assert caught.value.others == []


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
    began = time.monotonic()
    crew = Crew(FunctionJob(3), lambda event: None)
    for number, kind in enumerate(kinds):
        crew.hear(WorkerReport(number, "a", 1, failure=failure(number, kind)))
    deadline = crew.deadline()
    assert seconds <= deadline - began <= seconds + (time.monotonic() - began)
    crew.hear(WorkerReport(2, "a", 1, failure=failure(2, "ValueError")))
    assert crew.deadline() <= deadline


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


def test_a_crew_without_a_job_has_a_worker_per_host_and_a_grace_of_its_own() -> None:
    crew = Crew(None, lambda event: None, hosts=["a", "b"], grace=60.0)
    crew.hear(WorkerReport(1, "b", 0, failure=failure(1)))
    assert crew.missing == [0]
    assert crew.deadline() > time.monotonic() + 50
    crew.latest = time.monotonic()  # whoever follows it may stop earlier
    crew.follow(time.sleep)
    with pytest.raises(WorkerFailedError) as caught:
        crew.conclude()
    assert [one.rank for one in caught.value.failures] == [1, 0]
    assert caught.value.failures[1].host == "a"
