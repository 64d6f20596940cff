"""Messages for users if sparklyr's own workers do not start."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from conftest import wait_for

from pybackend.core.errors import ClusterError, WorkerFailedError
from pybackend.core.job.job import FunctionJob
from pybackend.core.job.messages import Note
from pybackend.core.launchers.spark import sessions as session
from pybackend.core.launchers.spark import sparklyr
from pybackend.core.launchers.spark.sparklyr import RStage, _explain
from pybackend.core.net.authentication import new_token
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient

PROTOBUF = "java.lang.ClassNotFoundException: com.google.protobuf.MessageOrBuilder"


@pytest.mark.parametrize(
    ("text", "missed"),
    [
        (f"Job aborted: RScript (62) terminated unexpectedly: {PROTOBUF}", []),
        ("java.lang.NoClassDefFoundError: com/google/protobuf/MessageOrBuilder", []),
        ("rscript failure with status 255", [f"the executors lack {PROTOBUF.split()[-1]}"]),
    ],
)
def test_a_spark_without_protobuf_is_told_the_settings(text: str, missed: list[str]) -> None:
    told = str(_explain(text, "10.0.0.1:4000", missed))
    assert 'config[["sparklyr.shell.driver-class-path"]]' in told
    assert 'config[["spark.executor.extraClassPath"]]' in told
    assert "libprotobuf-java" in told


def test_what_the_examination_found_comes_first() -> None:
    told = str(_explain("status 255", "10.0.0.1:4000", ["on a: there is no Python at /p"]))
    assert told.startswith("sparklyr could not run the workers: on a: there is no Python at /p\n")
    assert "10.0.0.1:4000" in told
    assert "status 255" in told


def test_without_a_finding_sparks_own_words_come_first() -> None:
    told = str(_explain("it broke Driver stacktrace: much more", "10.0.0.1:4000", []))
    assert told.startswith("sparklyr could not run the workers: it broke\n")
    assert "executors' logs" in told


class SilentJob:
    """A job of a driver that does not answer."""

    def cancel(self) -> None:
        self.cancelling.set()
        raise ClusterError("does not answer")

    def __init__(self) -> None:
        self.cancelling = threading.Event()


class Idle:
    is_busy = False

    def __init__(self, job: Any) -> None:
        pass

    def look(self) -> None:
        raise ClusterError("no task runs")


def test_events_are_passed_on_after_a_job_could_not_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sparklyr, "IdleWatch", Idle)
    job: Any = SilentJob()
    meeting = MeetingServer(None, "", 1)
    seen: list[Any] = []
    followed = RStage(FunctionJob(1), job, meeting, False).follow(seen.append)
    assert job.cancelling.wait(60)
    meeting.queue.put(Note("later"))
    wait_for(lambda: seen)
    with pytest.raises(ClusterError, match="no task runs"):
        followed.result(60)


def test_a_task_that_shows_no_sign_of_life_is_named_and_the_job_cancelled() -> None:
    job: Any = SilentJob()
    token = new_token()
    with (
        MeetingServer("127.0.0.1", token, 2, silence=0.5) as meeting,
        MeetingClient(meeting.address, token, 1, 10) as stopped,
    ):
        stopped.require()
        followed = RStage(FunctionJob(2), job, meeting, False).follow(print)
        assert job.cancelling.wait(60)
        with pytest.raises(WorkerFailedError, match="no sign of life") as caught:
            followed.result(60)
    assert (caught.value.rank, caught.value.exception_type) == (1, "WorkerStalled")


def test_a_slow_driver_is_not_asked_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparklyr, "run_watched", run_nothing)
    asked: list[str] = []
    monkeypatch.setattr(session, "ask", lambda _, what, call: asked.append(what) or "4.3.0")
    assert sparklyr._is_without_protobuf(None, 2)
    assert asked == ["its version"]


def run_nothing(session: Any, call: Any, pause: Any, idle_seconds: float) -> None:
    raise RuntimeError(f"java.lang.{PROTOBUF.partition('lang.')[2]}")
