"""The watch over a Spark job, with jobs that only claim to run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pybackend.errors import ClusterError
from pybackend.launchers.spark import jobs
from pybackend.launchers.spark.jobs import run_watched


class FakeJob:
    """A job that is busy, and whose thread does as it is asked."""

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
    with pytest.raises(ClusterError, match="did not take a job"):
        run_watched(None, lambda: 1)
