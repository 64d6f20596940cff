"""The monitoring of a Spark job, with jobs that only pretend to run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pybackend.core.errors import ClusterError
from pybackend.core.launchers.spark import explain
from pybackend.core.launchers.spark import spark_jobs as jobs
from pybackend.core.launchers.spark.explain import ask_executors
from pybackend.core.launchers.spark.spark_jobs import IdleWatch, run_watched


class FakeJob:
    """A job that is busy, and whose thread ends when it is cancelled."""

    session = None

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def __enter__(self) -> FakeJob:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, submit: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=submit, daemon=True)
        thread.start()
        return thread

    def mark(self) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled.set()

    def is_busy(self) -> bool:
        return True

    def find_others(self) -> str:
        return ""


class Unmarkable(FakeJob):
    def mark(self) -> None:
        raise OSError("no group")


class Unsubmitted(FakeJob):
    def start(self, submit: Callable[[], None]) -> threading.Thread:
        return super().start(lambda: None)


@pytest.fixture
def use_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeJob], FakeJob]:
    def use(job: FakeJob) -> FakeJob:
        monkeypatch.setattr(jobs, "new_job", lambda session: job)
        return job

    return use


def test_a_job_that_cannot_be_marked_fails_with_the_reason(use_job: Any) -> None:
    use_job(Unmarkable())
    with pytest.raises(OSError, match="no group"):
        run_watched(None, lambda: 1)


def test_a_thread_that_ends_before_its_call_is_an_error(use_job: Any) -> None:
    use_job(Unsubmitted())
    with pytest.raises(ClusterError, match="did not accept a job"):
        run_watched(None, lambda: 1)


def test_a_question_that_executors_do_not_answer_is_cancelled(
    use_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = use_job(FakeJob())
    monkeypatch.setattr(explain, "_LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(explain, "_ask", lambda session, look: job.cancelled.wait(60))
    with pytest.raises(ClusterError, match=r"no executor answered within 0\.2 s"):
        ask_executors(None, lambda: 1)
    assert job.cancelled.is_set()


class Clock:
    """A clock that only the test moves; sleeping takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        pass


class Answers(FakeJob):
    """A job that answers with a set value, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = True
        self.others = ""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Semaphore(0)

    def is_busy(self) -> bool:
        self.asked.release()
        self.may_answer.wait(60)
        return self.answer

    def find_others(self) -> str:
        return self.others


class Watched:
    """An `IdleWatch` with the test's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.asking: list[threading.Thread] = []
        monkeypatch.setattr(jobs, "time", self.clock)
        monkeypatch.setattr(jobs, "threading", SimpleNamespace(Thread=self.new_thread))
        self.job = Answers()
        self.watch = IdleWatch(self.job)

    def new_thread(self, **options: Any) -> threading.Thread:
        self.asking.append(threading.Thread(**options))
        return self.asking[-1]

    def ask(self) -> None:
        self.look_after(1.0)
        assert self.job.asked.acquire(timeout=60)

    def ask_and_hear(self) -> None:
        self.ask()
        self.look_after(0.1)

    def look_after(self, seconds: float) -> None:
        """Look, and wait for the answer to the question, if there is one."""
        self.clock.now += seconds
        self.watch.look()
        while self.asking and self.job.may_answer.is_set():
            self.asking.pop().join(timeout=60)

    def look_for(self, seconds: float, step: float = 1.0) -> None:
        for _ in range(round(seconds / step)):
            self.look_after(step)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(monkeypatch)
    yield made
    made.job.may_answer.set()


def test_a_driver_that_does_not_answer_for_a_minute_ends_the_wait(watched: Watched) -> None:
    watched.ask_and_hear()
    assert watched.watch.is_busy
    watched.job.may_answer.clear()
    watched.ask()
    watched.look_for(59)
    with pytest.raises(ClusterError, match="does not answer"):
        watched.look_for(3)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_watcher_that_was_suspended_does_not_blame_spark(
    watched: Watched, is_asked: bool
) -> None:
    watched.ask_and_hear()
    if is_asked:
        watched.job.may_answer.clear()
        watched.ask()
    watched.look_after(3600.0)
    watched.look_for(50)


def test_a_job_that_was_idle_before_a_gap_still_ends(watched: Watched) -> None:
    watched.job.answer = False
    watched.look_after(3600.0)
    with pytest.raises(ClusterError, match="is not running any task"):
        watched.look_for(70, step=0.5)


def test_a_job_waits_for_others_only_if_it_says_so(watched: Watched) -> None:
    said: list[str] = []
    watched.job.answer, watched.job.others = False, "job 3: count"
    with pytest.raises(ClusterError, match="is not running any task"):
        watched.look_for(70, step=0.5)
    watched.watch = IdleWatch(watched.job, on_wait=said.append)
    watched.look_for(300, step=0.5)
    assert said == [
        "a job is waiting for slots: other jobs of the session are running (job 3: count)"
    ]
    watched.job.others = ""
    with pytest.raises(ClusterError, match="is not running any task"):
        watched.look_for(70, step=0.5)
