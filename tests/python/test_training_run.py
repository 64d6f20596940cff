"""A training run in the session, and its restarts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pybackend import ClusterError, Recovery, WorkerFailedError
from pybackend.core.api import training_run
from pybackend.core.errors import Failure
from pybackend.core.job.job import TrainingJob


def test_the_pause_before_a_restart_grows_while_workers_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(training_run.time, "sleep", pauses.append)
    lost = WorkerFailedError([Failure(1, "b", "HostLost", "host b did not answer")])
    errors: list[Exception] = [lost, *[ClusterError("host b cannot be reached")] * 3]

    def run(*_: Any, **__: Any) -> None:
        raise errors.pop(0)

    job, recovery = TrainingJob(2, verbose=0), Recovery(restarts=3, pause=60)
    prepared: Any = SimpleNamespace(job=job, run=run, launcher=None, recovery=recovery)
    with pytest.raises(ClusterError, match="host b cannot be reached"):
        training_run.run_with_restarts(prepared, print)
    assert pauses == [60, 120]
    assert errors == []
