"""Runners with the APIs of TorchDistributor and of spark-tensorflow-distributor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import shared_spark, wait_for, worker_processes

from pybackend import InputError, TFDistributor, WorkerFailedError
from pybackend.core.errors import TfdistError
from pybackend.spark_tensorflow_distributor import MirroredStrategyRunner, _find_visible
from pybackend.tfos import TFParallel


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local-cluster[2,1,1024]") as session:
        yield session
    wait_for(lambda: not worker_processes())


def gather(offset: int = 0) -> Any:
    """A function of spark-tensorflow-distributor in its task."""
    import os

    from pyspark import BarrierTaskContext

    task = BarrierTaskContext.get()
    hidden = os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return [int(text) + offset for text in task.allGather(str(task.partitionId()))], hidden


@pytest.mark.full
def test_a_function_runs_in_tasks_of_spark_as_it_is(spark: Any) -> None:
    runner = MirroredStrategyRunner(num_slots=2, use_gpu=False, use_custom_strategy=True)
    assert runner.get_num_tasks() == 2
    assert runner.sc is spark.sparkContext
    for offset in (0, 5):  # a second one in the same session
        assert runner.run(gather, offset=offset) == ([offset, 1 + offset], True)


@pytest.mark.full
def test_a_function_is_called_in_the_scope_of_a_strategy(spark: Any, capsys: Any) -> None:
    def train(rows: int) -> Any:
        import numpy as np
        import tensorflow as tf

        strategy = tf.distribute.get_strategy()
        weight = tf.Variable(2.0)
        summed = strategy.reduce("sum", strategy.run(lambda: weight * 3), axis=None)
        found = strategy.num_replicas_in_sync, float(summed)
        if rows:
            model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(tf.data.Dataset.from_tensors((np.ones((rows, 1)), np.ones(rows))))
        return found

    runner = MirroredStrategyRunner(num_slots=2, use_gpu=False)
    assert runner.run(train, rows=0) == (2, 12.0)
    assert "note: TensorFlow's own servers" in capsys.readouterr().out
    with pytest.raises(WorkerFailedError, match="Keras 3 cannot `fit` under MultiWorkerMirrored"):
        runner.run(train, rows=4)


@pytest.mark.full
def test_locally_one_process_of_its_own_runs(spark: Any) -> None:
    import os

    def work(driver: int) -> Any:
        import os

        return os.getpid() != driver, os.environ["CUDA_VISIBLE_DEVICES"]

    runner = MirroredStrategyRunner(
        num_slots=1, local_mode=True, use_gpu=False, use_custom_strategy=True
    )
    assert runner.run(work, driver=os.getpid()) == (True, "")


def test_what_a_runner_cannot_do_is_refused(spark: Any) -> None:
    cases: dict[str, Any] = {
        "`num_slots` must be at least 1": lambda: MirroredStrategyRunner(num_slots=0),
        "spark.task.resource.gpu.amount is not set": lambda: MirroredStrategyRunner(num_slots=2),
        "`gpu_resource_name` is 'tpu'": lambda: MirroredStrategyRunner(
            num_slots=1, gpu_resource_name="tpu"
        ),
        "local_mode=True without GPUs has one slot": lambda: MirroredStrategyRunner(
            num_slots=2, local_mode=True, use_gpu=False
        ),
        "the driver has no GPUs": lambda: MirroredStrategyRunner(num_slots=1, local_mode=True).run(
            gather
        ),
        "`train_fn` must be a function": lambda: MirroredStrategyRunner(
            num_slots=1, use_gpu=False
        ).run("train.py"),
        "unexpected keyword argument 'x'": lambda: MirroredStrategyRunner(
            num_slots=1, use_gpu=False
        ).run(gather, x=1),
        "`num_processes` must be at least 1": lambda: TFDistributor(0),
        "`local_mode` must be True or False": lambda: TFDistributor(1, "no"),  # type: ignore[arg-type]
        "but this machine has 0": lambda: TFDistributor(1, use_gpu=True).run(gather),
        "a script does not take named arguments": lambda: TFDistributor(1).run(__file__, rate=1),
        "with 2 arguments, but takes": lambda: TFDistributor(1).run(gather, 1, 2),
    }
    for message, call in cases.items():
        with pytest.raises(InputError, match=message):
            call()


def test_without_a_session_nothing_is_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    with pytest.raises(InputError, match="local_mode=False needs a Spark session, but none is"):
        TFDistributor(local_mode=False)


def test_the_drivers_gpus_are_found_among_those_that_it_sees() -> None:
    assert _find_visible(["1", "2"], ["1", "2", "3"]) == ["1", "2"]
    assert _find_visible(["0", "1"], ["2", "3"]) == ["2", "3"]
    assert _find_visible(["GPU-a"], ["GPU-a"]) == ["GPU-a"]
    with pytest.raises(InputError, match="unset the variable"):
        _find_visible(["4"], ["2", "3"])


def test_the_value_of_the_first_process_comes_back(tmp_path: Path, capfd: Any) -> None:
    def work(rate: float, *, options: Any) -> Any:
        import os

        is_first = os.environ["TFDIST_RANK"] == "0"
        return {"rate": rate, **options} if is_first else object()  # which cannot be pickled

    assert TFDistributor(2).run(work, 0.5, options={"workers": 3}) == {"rate": 0.5, "workers": 3}
    script = tmp_path / "train.py"
    script.write_text("import sys; print('arguments', sys.argv[1:])")
    assert TFDistributor(2).run(str(script), "--rate", 0.5) is None
    assert "[1] arguments ['--rate', '0.5']" in capfd.readouterr().out


@pytest.mark.full
def test_a_script_runs_in_tasks_of_spark(spark: Any, tmp_path: Path) -> None:
    script, there = tmp_path / "train.py", tmp_path / "there"
    script.write_text(f"import os; open({str(there)!r} + os.environ['TFDIST_RANK'], 'w')")
    assert TFDistributor(2, local_mode=False).run(str(script)) is None
    assert sorted(path.name for path in tmp_path.glob("there*")) == ["there0", "there1"]


def test_the_same_function_runs_on_every_executor(spark: Any, tmp_path: Path) -> None:
    def work(args: Any, ctx: Any) -> Any:
        import os

        assert "TF_CONFIG" not in os.environ
        with open(f"{args['folder']}/{ctx.worker_num}", "w") as file:
            file.write(f"{ctx.executor_id} of {ctx.num_workers} at {ctx.defaultFS}")
        return object()

    args = {"folder": str(tmp_path)}
    TFParallel.run(spark.sparkContext, work, args, 3, use_barrier=False)  # two, then one
    files = sorted(tmp_path.iterdir())
    assert [path.read_text() for path in files] == [f"{i} of 3 at file://" for i in range(3)]
    with pytest.raises(TfdistError, match="runs at most 2 tasks at a time"):
        TFParallel.run(spark.sparkContext, work, args, 3)
    TFParallel.run(spark.sparkContext, work, args, 2)
    assert files[0].read_text() == "0 of 2 at file://"


def test_servers_end_on_spark(spark: Any) -> None:
    def work(context: Any) -> Any:
        import signal

        if context.role == "ps":
            signal.pause()
        return context.role

    from pybackend import barrier_run

    assert barrier_run(spark, work, roles={"chief": 1, "ps": 1}, verbose=0) == ["chief", None]
