"""Trials on the executors of a real Spark cluster, in classic sessions and with Connect."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import keras
import pytest
from conftest import shared_spark, wait_for, worker_processes
from connect import connect_server, new_session
from test_spark import executors, frame

from pybackend import ClusterError, Recovery, barrier_train, train_many
from pybackend.types import Trial, Trials

# One core each: two trials can only train at once if each is on an executor of its own.
MASTER = "local-cluster[2,1,1024]"
COMMON: dict[str, Any] = {"epochs": 2, "batch_size": 50, "seed": 4, "verbose": 0}


def build(units: int) -> Any:
    import keras

    layers = [keras.Input((8,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


class Meet(keras.callbacks.Callback):
    """Waits until this many trials train at once. Then one of them kills a process, once."""

    def __init__(self, folder: Path, trials: int, victim: int | None = None) -> None:
        super().__init__()
        self.folder, self.trials, self.victim = str(folder), trials, victim

    def on_train_begin(self, logs: Any = None) -> None:
        folder, end = Path(self.folder), time.monotonic() + 120
        (folder / f"trial-{os.getpid()}").touch()
        while len(list(folder.glob("trial-*"))) < self.trials:
            if time.monotonic() > end:
                raise TimeoutError("the trials do not train at once")
            time.sleep(0.05)
        if self.victim is not None:
            with suppress(FileExistsError):
                (folder / "killed").touch(exist_ok=False)
                os.kill(self.victim, signal.SIGKILL)


def search(spark: Any, data: Any, meet: Meet, **settings: Any) -> Trials:
    """Run a trial more than can train at once."""
    grid = {"units": [*range(2, 3 + meet.trials)]}
    return train_many(spark, build, data, grid=grid, callbacks=[meet], **COMMON, **settings)


def assert_as_alone(spark: Any, data: Any, trials: Iterable[Trial]) -> None:
    """Check that each completed trial has the history and the weights of a training run alone."""
    for trial in trials:
        if trial.result is not None:
            model = partial(build, **trial.arguments)
            alone = barrier_train(spark, model, data, workers=1, **COMMON)
            assert trial.result.history == alone.history
            workers = trial.result.workers, alone.workers
            one, other = (worker.weights_sha256 for (worker,) in workers)
            assert one == other


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark(MASTER) as session:
        yield session
    wait_for(lambda: not worker_processes())


def test_trials_train_at_once_on_the_executors(spark: Any, rows: Any, tmp_path: Path) -> None:
    data = frame(spark, *rows)
    with pytest.raises(ClusterError, match=r"`parallelism` is 3.*use at most 2"):
        train_many(spark, build, data, grid={"units": [2, 3, 4]}, parallelism=3)
    trials = search(spark, data, Meet(tmp_path, 2))
    assert trials.parallelism == 2
    assert [trial.error for trial in trials] == [None] * 3
    assert_as_alone(spark, data, [trials[0]])  # all of them in the full run


@pytest.mark.full
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_lost_executor_is_a_failed_trial_or_a_restart(
    restarts: int, spark: Any, rows: Any, tmp_path: Path
) -> None:
    data = frame(spark, *rows)
    meet = Meet(tmp_path, 2, victim=executors()[0])
    trials = search(spark, data, meet, recovery=Recovery(restarts=restarts))
    failed = [trial.error for trial in trials if trial.status == "failed"]
    assert len(failed) == 1 - restarts
    assert all("Spark lost executor" in str(error) for error in failed)
    assert sum(len(trial.result.restarts) for trial in trials if trial.result) == restarts
    assert_as_alone(spark, data, trials)


@pytest.mark.full
@pytest.mark.timeout(420)
def test_a_connect_session_runs_trials_at_once_and_loses_an_executor(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")  # as `SparkSession.builder` does
    settings = {
        "spark__dynamicAllocation__enabled": "false",
        "spark__executor__memory": "512m",
    }
    (tmp_path / "server").mkdir()
    with connect_server(tmp_path / "server", master=MASTER, **settings) as (url, _):
        session = new_session(url)
        data = frame(session, *rows)
        trials = search(session, data, Meet(tmp_path, 2))
        assert trials.parallelism == 2
        assert [trial.error for trial in trials] == [None] * 3
        assert_as_alone(session, data, trials)
        for mark in tmp_path.glob("trial-*"):
            mark.unlink()
        trials = search(session, data, Meet(tmp_path, 2, victim=executors()[0]))
        failed = [str(trial.error) for trial in trials if trial.status == "failed"]
        assert len(failed) == 1
        assert "Spark lost executor" in failed[0]
        session.stop()
