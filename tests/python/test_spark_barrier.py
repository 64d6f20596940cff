"""Elastic training on Spark, with a real local cluster: two executors in their own processes."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import test_elastic
from cloudpickle import register_pickle_by_value
from conftest import build_dense, full, shared_spark, wait_for, worker_processes
from killing import KillAt
from test_elastic import X, Y

import pybackend
from pybackend import ClusterError, Elastic, InputError, barrier_train
from pybackend.core.launchers.spark import spark_jobs as jobs

register_pickle_by_value(test_elastic)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local-cluster[2,1,1024]") as session:
        yield session
    wait_for(lambda: not worker_processes())


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    wait_for(lambda: not worker_processes())


class KeepRows(keras.callbacks.Callback):
    """Copies the rows of each worker, in its order."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def on_train_begin(self, logs: Any = None) -> None:
        rows = Path(os.environ["TMPDIR"], "train", "rows.npy")
        shutil.copy(rows, Path(self.folder, f"{os.environ['TFDIST_WORKER']}.npy"))


def make_frame(spark: Any) -> Any:
    columns = {f"x{place}": X[:, place].astype("float64") for place in range(4)}
    return spark.createDataFrame(pandas.DataFrame({**columns, "label": Y}))


def next_stage(spark: Any) -> int:
    """Return a number that is larger than those of all stages so far."""
    context = spark.sparkContext
    context.setJobGroup("next stage", "")
    context.parallelize([0], 1).count()
    tracker = context.statusTracker()
    jobs = tracker.getJobIdsForGroup("next stage")
    context.setLocalProperty("spark.jobGroup.id", None)
    return max(stage for job in jobs for stage in tracker.getJobInfo(job).stageIds) + 1


EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        (None, "the process was killed by SIGKILL"),
        full("parent", "the Spark task's Python process, which supervised the worker"),
        full(EXECUTOR, "Spark lost executor "),
    ],
    ids=["worker", "task", "executor"],
)
def test_a_worker_that_is_killed_is_replaced(
    spark: Any, tmp_path: Path, capsys: Any, victim: str | None, reason: str
) -> None:
    killer = KillAt(0, 1, 2, tmp_path / "killed")
    if victim:
        Path(f"{killer.mark}.victim").write_text(victim)
    stop = test_elastic.StopWhenJoined(tmp_path, number=2)
    settings = {"workers": Elastic(2, max=2), "epochs": 500}
    first = next_stage(spark)
    result = test_elastic.train(killer, stop, target=spark, **settings)
    assert [generation.workers for generation in result.generations] == [[0, 1], [1], [1, 2]]
    assert result.generations[1].left["0"].startswith(reason)
    lost = result.generations[1]
    # Without its task or executor, a worker takes steps until its end is noticed.
    assert lost.epoch >= 2 if victim else (lost.epoch, lost.step > 1) == (2, True)
    assert "worker 0 on 127.0.0.1 was lost" in capsys.readouterr().out
    test_elastic.check_exact(result)
    # Spark has attempted no stage again.
    found = map(spark.sparkContext.statusTracker().getStageInfo, range(first, first + 100))
    attempts = {stage.name: stage.currentAttemptId for stage in found if stage}
    assert attempts
    assert set(attempts.values()) == {0}


@pytest.mark.full
@pytest.mark.launcher
def test_rows_of_a_dataframe_survive_an_executor(spark: Any, tmp_path: Path) -> None:
    killer, keep = KillAt(1, 1, 2, tmp_path / "killed"), KeepRows(tmp_path)
    Path(f"{killer.mark}.victim").write_text(EXECUTOR)
    stop = test_elastic.StopWhenJoined(tmp_path, number=2)
    result = test_elastic.train(
        killer,
        stop,
        keep,
        target=spark,
        data=make_frame(spark),
        validation_data=make_frame(spark),
        workers=Elastic(2, max=2),
        epochs=500,
        verbose=0,
    )
    assert [generation.workers for generation in result.generations] == [[0, 1], [0], [0, 2]]
    first, *others = (np.load(tmp_path / f"{number}.npy") for number in range(3))
    assert all(np.array_equal(first, rows) for rows in others)
    data = first["f0"], first["f1"].reshape(-1)
    assert np.array_equal(np.sort(data[0], axis=None), np.sort(X, axis=None))
    test_elastic.check_exact(result, data=data)
    assert len(result.history["val_loss"]) == result.epochs


@pytest.mark.full
@pytest.mark.launcher
def test_rows_that_differ_from_worker_to_worker_are_rejected(spark: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)
    from pyspark.sql.functions import udf

    @udf("double")
    def draw() -> float:
        import random

        return random.random()

    data = make_frame(spark).withColumn("x0", draw())
    with pytest.raises(ClusterError, match=r"worker \d on .* got other rows of `data` than worker"):
        test_elastic.train(target=spark, data=data, workers=Elastic(2))


@pytest.mark.full
@pytest.mark.launcher
def test_a_worker_waits_for_a_slot_while_another_receives_its_rows(
    spark: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)
    monkeypatch.setattr(jobs, "_IDLE_SECONDS", 6.0)

    def wait(batches: Any) -> Any:
        time.sleep(10)
        yield from batches

    frame = make_frame(spark).repartition(2)
    data = frame.mapInPandas(wait, frame.schema)
    result = test_elastic.train(target=spark, data=data, workers=Elastic(2), epochs=1)
    assert result.workers_by_epoch == [2]


def test_workers_run_in_the_scheduler_pool_of_the_caller(
    spark: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)
    folder = str(tmp_path)

    def note_pool(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        pool = context.getLocalProperty("spark.scheduler.pool")
        Path(folder, f"{pool}-{context.taskAttemptId()}").touch()
        yield from batches

    frame = make_frame(spark)
    data = frame.mapInPandas(note_pool, frame.schema)
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", "mine")
    try:
        test_elastic.train(target=spark, data=data, workers=Elastic(2), epochs=1, verbose=0)
        assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
    finally:
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", None)
    found = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert len(found) >= 2
    assert set(found) == {"mine"}


@pytest.mark.full
@pytest.mark.launcher
def test_a_dataframe_without_rows(spark: Any) -> None:
    with pytest.raises((InputError, pybackend.WorkerFailedError), match="`data` has no rows"):
        test_elastic.train(
            target=spark, data=make_frame(spark).where("x0 > 99"), workers=Elastic(2)
        )


def test_what_an_elastic_training_needs(spark: Any) -> None:
    settings: dict[str, Any] = {"workers": Elastic(2)}
    planned = pybackend.plan(spark, test_elastic.build, (X, Y), **settings)
    assert [worker.place for worker in planned.workers] == ["its own Spark job"] * 2
    with pytest.raises(ClusterError, match="at most 2 tasks"):
        barrier_train(spark, build_dense, (X, Y), workers=Elastic(3))
    options = pybackend.DataOptions(repartition=False)
    with pytest.raises(InputError, match="repartition=False: every worker has all rows"):
        barrier_train(spark, build_dense, make_frame(spark), data_options=options, **settings)
