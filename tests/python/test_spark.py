"""The Spark launcher on a real local cluster: two executors in their own processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
from cloudpickle import dumps
from conftest import (
    build_dense,
    full,
    largest_difference,
    shared_spark,
    stop_at_end,
    wait_for,
    worker_processes,
)
from contract import System, contract
from pyspark import InheritableThread
from warm import OF_SPARK

import pybackend
from pybackend import (
    ClusterError,
    InputError,
    ModelOptions,
    Observer,
    Recovery,
    WorkerFailedError,
    barrier_run,
    barrier_train,
)
from pybackend.core.job.job import FUNCTION, FunctionJob, make_job
from pybackend.core.job.storage_options import DataOptions
from pybackend.core.job.value_codec import decode_value
from pybackend.core.launchers.spark import barrier as spark_launcher
from pybackend.core.launchers.spark import explain, sparklyr, stage
from pybackend.core.launchers.spark import sessions as session_module
from pybackend.core.launchers.spark import spark_jobs as spark_job
from pybackend.core.launchers.spark.barrier import SparkLauncher
from pybackend.core.launchers.spark.sessions import driver_python, ship_package
from pybackend.core.launchers.spark.sparklyr import attach_spark
from pybackend.core.launchers.spark.stage import check_network
from pybackend.core.net import rendezvous
from pybackend.core.net.authentication import greet_as_server
from pybackend.core.net.meeting import MeetingServer
from pybackend.mnist_example import digit_model
from pybackend.types import WorkerContext


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local-cluster[2,1,1024]") as session:
        yield session
    wait_for(lambda: not worker_processes())


_SESSION = """
from pyspark.sql import SparkSession
settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}
builder = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=settings)
"""


@pytest.fixture
def system(spark: Any) -> System:
    return System(spark, "builder.getOrCreate()", _SESSION, variables={OF_SPARK: "1"})


# In test_standalone, a driver on a cluster of several hosts is killed.
TestContract = contract(without=["test_nothing_outlives_a_driver_that_is_killed"])


def frame(spark: Any, x: Any, y: Any) -> Any:
    columns = {f"f{i}": x[:, i].astype("float64") for i in range(x.shape[1])}
    import pandas as pd

    return spark.createDataFrame(pd.DataFrame({**columns, "label": y}))


def resources_here(context: WorkerContext) -> Any:
    import os

    return os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.launcher
def test_workers_are_to_have_no_more_than_an_executor(spark: Any) -> None:
    def run(**wanted: Any) -> Any:
        resources = pybackend.Resources(**wanted)
        return barrier_run(spark, resources_here, workers=2, resources=resources, verbose=0)

    assert run(cpus=1, memory="2GB", gpus=0) == [("1", "")] * 2
    with pytest.raises(ClusterError, match="at most 0 tasks with 2 cores each"):
        run(cpus=2)
    executor = r"has 0: start the session with spark\.executor\.resource\.gpu\.amount=1$"
    with pytest.raises(InputError, match=executor):
        run(gpus=1)
    with pytest.raises(InputError, match="2 workers need 2 TB of memory"):
        run(memory="1TB")


def test_the_check_of_the_network_leaves_its_pythons_to_the_next_tasks(spark: Any) -> None:
    def name_python(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        yield from (pa.RecordBatch.from_pydict({"pid": [os.getpid()]}) for _ in batches)

    def pythons() -> set[int]:
        numbers = spark.range(0, 2, 1, 2).mapInArrow(name_python, "pid long", barrier=True)
        return {row["pid"] for row in numbers.collect()}

    ship_package(spark)
    with driver_python(spark):
        before = pythons()
        check_network(spark, 2)
        assert pythons() == before


@pytest.mark.launcher
def test_a_worker_that_takes_more_memory_is_ended(spark: Any) -> None:
    def grow(context: WorkerContext) -> None:
        import threading

        kept = bytearray((600 if context.rank else 1) << 20)
        threading.Event().wait(60 * len(kept))

    wanted = pybackend.Resources(memory="400MB")
    with pytest.raises(WorkerFailedError, match=r"worker 1 used \d+ MB of its 400 MB") as caught:
        barrier_run(spark, grow, workers=2, resources=wanted, verbose=0)
    assert (caught.value.rank, caught.value.exception_type) == (1, "MemoryExceeded")


@pytest.mark.full
@pytest.mark.launcher
def test_arrays_give_the_same_weights_as_on_this_machine(
    spark: Any, rows: Any, capsys: Any
) -> None:
    x, y = rows
    arguments: dict[str, Any] = {
        "workers": 2,
        "epochs": 2,
        "batch_size": 40,
        "seed": 5,
        "validation_data": (x[:101], y[:101]),
    }
    seen: list[int] = []

    def watch(epoch: int, logs: Any) -> bool:
        seen.append(epoch)
        return epoch == 2

    longer = {**arguments, "epochs": 5, "callbacks": [Observer(watch, lambda step, logs: None)]}
    cluster = barrier_train(spark, build_dense, (x, y), **longer)
    assert "epoch 2/5" in capsys.readouterr().out  # live, from the executors
    assert seen == [1, 2]
    local = barrier_train(None, build_dense, (x, y), **arguments, verbose=0)
    assert largest_difference(cluster.model, local.model) <= 1e-6
    assert cluster.history["val_accuracy"] == pytest.approx(local.history["val_accuracy"])
    assert [w.rank for w in cluster.workers] == [0, 1]
    assert len({w.pid for w in cluster.workers}) == 2
    assert len({w.weights_sha256 for w in cluster.workers}) == 1


@pytest.mark.full
def test_a_model_goes_to_executors_by_value(spark: Any, rows: Any) -> None:
    class Halves(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.factor = 1.0

        def call(self, x: Any) -> Any:
            return self.factor * self.dense(x)

    model = Halves()
    model.factor = 0.5
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model(rows[0][:1])
    options: dict[str, Any] = {"workers": 2, "batch_size": 100, "seed": 5, "verbose": 0}
    cluster = barrier_train(spark, model, rows, **options)
    assert (type(cluster.model), cluster.model.factor) == (Halves, 0.5)
    local = barrier_train(None, model, rows, **options)
    assert largest_difference(cluster.model, local.model) <= 1e-6


def test_a_dataframe_is_every_row_once(spark: Any, rows: Any, dense_model: Any) -> None:
    x, y = rows[0][:240], rows[1][:240]
    data = frame(spark, x, y)
    # One step with all rows per epoch, so that the order of Spark's rows does not matter.
    result = barrier_train(
        spark,
        dense_model,
        data.orderBy("label"),
        workers=2,
        epochs=3,
        batch_size=240,
        validation_data=data.limit(60),
        verbose=0,
    )
    assert sum(w.rows for w in result.workers) == 240
    history = dense_model.fit(x, y, batch_size=240, epochs=3, shuffle=False, verbose=0).history
    np.testing.assert_allclose(result.history["loss"], history["loss"], rtol=1e-5)
    assert largest_difference(dense_model, result.model) <= 1e-6
    assert len(result.history["val_loss"]) == 3


@pytest.mark.full
def test_validation_columns_go_by_name(spark: Any) -> None:
    pairs = [(1.0, 100.0, 0), (2.0, 200.0, 1)] * 4
    train = spark.createDataFrame(pairs, "a double, b double, `my.label` int")
    validation = train.select("b", "`my.label`", "a").limit(4)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    result = barrier_train(
        spark,
        model,
        train,
        label="my.label",
        workers=2,
        batch_size=8,
        validation_data=validation,
        verbose=0,
    )
    rows = [tuple(row) for row in validation.select("a", "b", "`my.label`").collect()]
    x = np.array([row[:2] for row in rows], "float32")
    expected = result.model.evaluate(x, np.array([row[2] for row in rows]), verbose=0)
    assert result.history["val_loss"][0] == pytest.approx(expected, rel=1e-5)


def test_no_rows_at_all_are_named(spark: Any, rows: Any) -> None:
    empty = frame(spark, *rows).limit(0)
    with pytest.raises((InputError, WorkerFailedError), match="`data` has no rows"):
        barrier_train(spark, build_dense, empty, workers=2, verbose=0)


@pytest.mark.full
def test_arrays_and_vectors_in_columns(spark: Any, rows: Any) -> None:
    from pyspark.ml.feature import VectorAssembler

    x, y = rows[0][:60], rows[1][:60]
    wide = VectorAssembler(inputCols=[f"f{i}" for i in range(8)], outputCol="features").transform(
        frame(spark, x, y)
    )
    from pyspark.ml.functions import vector_to_array

    listed = wide.withColumn("listed", vector_to_array("features"))
    weights = [
        barrier_train(
            spark,
            build_dense,
            listed,
            features=[column],
            workers=1,
            batch_size=60,
            seed=1,
            verbose=0,
        ).model.get_weights()
        for column in ("features", "listed")
    ]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)  # the rows arrive in another order


@pytest.mark.full
def test_images_in_flat_rows_take_the_shape_of_the_model(spark: Any) -> None:
    rng = np.random.default_rng(1)
    rows = [(rng.random(784).tolist(), int(i % 10)) for i in range(20)]
    data = spark.createDataFrame(rows, "image array<double>, label int")
    result = barrier_train(spark, digit_model, data, workers=2, batch_size=10, verbose=0)
    assert result.model.input_shape == (None, 28, 28, 1)


@pytest.mark.full
def test_text_bytes_named_inputs_and_weights(spark: Any, rows: Any) -> None:
    x, y = rows
    animals = ["cat", "dog", "owl"]
    images = (np.abs(x[:, :6]) * 50).astype("uint8")
    weights = np.linspace(0.5, 1.5, 500)
    data = spark.createDataFrame(
        [
            (bytearray(image), [float(v) for v in row], animals[label], float(weight))
            for image, row, label, weight in zip(images, x, y, weights, strict=True)
        ],
        "image binary, numbers array<double>, animal string, weight double",
    )

    def build() -> Any:
        image = keras.Input((2, 3), name="image")
        numbers = keras.Input((8,), name="numbers")
        flat = keras.layers.Flatten()(image)
        joined = keras.layers.Concatenate()([flat, numbers])
        model = keras.Model({"image": image, "numbers": numbers}, keras.layers.Dense(3)(joined))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.001), loss)
        return model

    data.createOrReplaceTempView("animals")
    result = barrier_train(
        spark,
        build,
        spark.sql("SELECT * FROM animals WHERE weight > 0"),
        features={"image": "image", "numbers": "numbers"},
        label="animal",
        weight="weight",
        data_options=DataOptions(tensors={"image": ("uint8", (2, 3))}),
        workers=2,
        batch_size=250,
        seed=3,
        verbose=0,
    )
    assert result.levels == animals
    keras.utils.set_random_seed(3)
    model = build()
    inputs = {"image": images.reshape(-1, 2, 3), "numbers": x}
    model.train_on_batch(inputs, y, sample_weight=weights.astype("float32"))
    assert largest_difference(model, result.model) <= 1e-6


@pytest.mark.full
def test_a_seed_repeats_the_order_of_a_dataframe(spark: Any, rows: Any) -> None:
    data = frame(spark, *rows).repartition(7)

    def train(data: Any) -> Any:
        common: Any = {"workers": 2, "epochs": 2, "batch_size": 16, "seed": 4, "verbose": 0}
        return barrier_train(spark, build_dense, data, **common).model

    assert largest_difference(train(data), train(data)) == 0


def test_partitions_are_kept_where_asked_for(spark: Any, rows: Any) -> None:
    by_label = frame(spark, *rows).repartition(2, "label")
    common: Any = {"data_options": DataOptions(repartition=False), "verbose": 0}
    sizes = {
        r["n"]
        for r in by_label.selectExpr("spark_partition_id() AS p")
        .groupBy("p")
        .agg({"*": "count"})
        .withColumnRenamed("count(1)", "n")
        .collect()
    }
    result = barrier_train(spark, build_dense, by_label, workers=2, **common)
    assert {worker.rows for worker in result.workers} == sizes
    with pytest.raises(InputError, match="has 2 partitions, not workers=1: use workers=2"):
        barrier_train(spark, build_dense, by_label, workers=1, **common)


@pytest.mark.full
def test_a_model_too_large_for_the_driver_asks_for_a_uri(
    spark: Any, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_launcher, "_RESULT_SHARE", 1e-5)
    with pytest.raises(WorkerFailedError, match=r"at most 0 MB can be sent .*: pass a path that"):
        barrier_train(spark, build_dense, rows, workers=2, verbose=0)
    uri, path = tmp_path / "model.h5", str(tmp_path / "rows")
    frame(spark, *rows).repartition(3).write.parquet(path)
    result = barrier_train(
        spark, build_dense, path, workers=2, model_options=ModelOptions(uri=uri), verbose=0
    )
    assert sum(worker.rows for worker in result.workers) == 500  # which the workers read
    assert largest_difference(result.model, pybackend.load_model(uri)) == 0


@pytest.mark.full
def test_a_large_model_comes_back_in_pieces(spark: Any) -> None:
    def build() -> Any:
        model = keras.Sequential([keras.Input((2000,)), keras.layers.Dense(2500)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    data = np.zeros((2, 2000), "float32"), np.zeros((2, 2500), "float32")
    result = barrier_train(spark, build, data, workers=2, seed=1, verbose=0)
    keras.utils.set_random_seed(1)
    assert largest_difference(build(), result.model) == 0


@pytest.mark.full
def test_fewer_rows_than_workers_leave_an_empty_partition(spark: Any, rows: Any) -> None:
    data = frame(spark, rows[0][:1], rows[1][:1])
    result = barrier_train(spark, build_dense, data, workers=2, batch_size=4, verbose=0)
    assert sorted(w.rows for w in result.workers) == [0, 1]
    assert np.isfinite(result.history["loss"]).all()


@pytest.mark.full
def test_bad_rows_are_named(spark: Any, rows: Any) -> None:
    from pyspark.sql.functions import when

    data = frame(spark, rows[0][:20], rows[1][:20])
    one_hole = data.withColumn("f3", when(data.f0 == float(rows[0][0, 0]), None).otherwise(data.f3))
    with pytest.raises(WorkerFailedError, match=r"column 'f3' has 1 null") as caught:
        barrier_train(spark, build_dense, one_hole, workers=2, verbose=0)
    assert caught.value.exception_type == "InputError"
    ragged = spark.createDataFrame([([1.0], 0), ([1.0, 2.0], 1)] * 4, "a array<double>, label int")
    with pytest.raises(WorkerFailedError, match=r"column 'a' has . numbers in the row"):
        barrier_train(spark, build_dense, ragged, workers=2, verbose=0)


@pytest.mark.full
def test_a_column_of_nulls_is_named(spark: Any, rows: Any) -> None:
    from pyspark.sql.functions import lit

    data = frame(spark, rows[0][:20], rows[1][:20]).withColumn("f3", lit(None).cast("float"))
    with pytest.raises(WorkerFailedError, match=r"column 'f3' has .* null") as caught:
        barrier_train(spark, build_dense, data, workers=2, verbose=0)
    assert caught.value.exception_type == "InputError"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": "nothing"}, "no column 'nothing'.*f0"),
        ({"features": ["f1", "oops"]}, "no column 'oops'"),
        ({"features": ["label"]}, "both the label and a feature"),
        ({"label": "when", "features": ["f0"]}, "label column 'when'.*type date"),
        ({}, "column 'when'.*type date"),
        ({"workers": 3, "features": ["f0"]}, "at most 2 tasks"),
    ],
)
def test_bad_columns_are_refused_before_any_job(
    spark: Any, rows: Any, arguments: dict[str, Any], message: str
) -> None:
    from pyspark.sql.functions import lit

    data = frame(spark, rows[0][:20], rows[1][:20]).withColumn("name", lit("x"))
    data = data.selectExpr("*", "date'2026-01-01' AS when")
    error = ClusterError if "workers" in arguments else InputError
    with pytest.raises(error, match=message):
        barrier_train(spark, build_dense, data, **{"workers": 2, **arguments})


def test_a_dataframe_needs_its_session(spark: Any, rows: Any) -> None:
    with pytest.raises(InputError, match="pass its session"):
        barrier_train(None, build_dense, frame(spark, *rows), workers=2)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_stopped_after_the_last_step_is_named(
    spark: Any, rows: Any, rank: int
) -> None:
    with pytest.raises(WorkerFailedError, match="stopped") as caught:
        barrier_train(
            spark,
            build_dense,
            rows,
            workers=2,
            recovery=Recovery(timeout=3),
            callbacks=[stop_at_end(rank)],
            verbose=0,
        )
    assert (caught.value.rank, caught.value.exception_type) == (rank, "WorkerStalled")
    assert caught.value.host == "127.0.0.1"
    wait_for(lambda: not worker_processes())
    wait_for(lambda: not list(Path(tempfile.gettempdir()).glob("tfdist-[01]-*")))


@pytest.mark.full
@pytest.mark.launcher
def test_a_task_that_is_stopped_with_its_worker_is_named_and_a_quiet_one_is_not(
    spark: Any,
) -> None:
    def work(context: WorkerContext) -> None:
        import time

        if context.rank == 0:
            for pid in (os.getppid(), os.getpid()):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(600)

    job = replace(make_job(FunctionJob, {"workers": 2, "verbose": 0}), timeout=2.5)
    with pytest.raises(WorkerFailedError, match="no sign of life for 5 s") as caught:
        SparkLauncher(spark).launch(job, {FUNCTION: dumps((work, ()))}, {}, print)
    assert (caught.value.rank, caught.value.host) == (0, "127.0.0.1")
    assert caught.value.exception_type == "WorkerStalled"
    assert caught.value.others == []
    wait_for(lambda: not worker_processes())


@pytest.mark.launcher
def test_a_task_whose_python_is_killed_is_named(spark: Any) -> None:
    def work(context: WorkerContext) -> None:
        if context.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(WorkerFailedError, match="Spark task's") as caught:
        barrier_run(spark, work, workers=2, verbose=0)
    assert (caught.value.rank, caught.value.host) == (1, "127.0.0.1")
    wait_for(lambda: not worker_processes())


class Watched(MeetingServer):
    """Records how the workers met."""

    answers: ClassVar[list[bytes | None]] = []

    def __exit__(self, *error: object) -> None:
        self.answers.append(self._answer)
        super().__exit__(*error)


def greet_all_but(rejected: Sequence[int]) -> Callable[..., int]:
    """Return a `greet_as_server` that does not answer the proof of some ranks.

    Closing the connection after the greeting would be too late: the member may have joined.
    """

    def greet(stream: Any, *arguments: Any) -> int:
        read = stream.read_exactly

        def read_proof(count: int, seconds: float) -> bytes:
            message = bytes(read(count, seconds))
            if int.from_bytes(message[32:36], "big") in rejected:
                raise ConnectionError("rejected")
            return message

        stream.read_exactly = read_proof
        try:
            return greet_as_server(stream, *arguments)
        finally:
            del stream.read_exactly

    return greet


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("rejected", "answer"), [full((), b"Everyone"), full((1,), b"MeetElsewhere"), ((0, 1), None)]
)
def test_workers_meet_at_the_driver_or_all_by_spark(
    spark: Any, monkeypatch: Any, rejected: Sequence[int], answer: bytes | None
) -> None:
    monkeypatch.setattr(rendezvous, "greet_as_server", greet_all_but(rejected))
    monkeypatch.setattr(stage, "MeetingServer", Watched)
    monkeypatch.setattr(spark_launcher, "_MEET_SECONDS", 5.0)
    assert barrier_run(spark, lambda context: context.rank, workers=2, verbose=0) == [0, 1]
    found = Watched.answers.pop()
    assert answer in found if found and answer else found is answer


@pytest.mark.full
@pytest.mark.launcher
def test_a_group_that_has_failed_can_be_launched_again(spark: Any, tmp_path: Path) -> None:
    """Start again as a restart does: the same launcher, the same job, the same files."""

    def work(context: WorkerContext, marker: str) -> int:
        from pathlib import Path

        if context.rank == 1 and not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("only the first time")
        return context.rank

    launcher, job = (
        spark_launcher.SparkLauncher(spark),
        make_job(FunctionJob, {"workers": 2, "verbose": 0}),
    )
    files = {FUNCTION: dumps((work, (str(tmp_path / "failed"),)))}
    with pytest.raises(WorkerFailedError, match="only the first time"):
        launcher.launch(job, files, {}, print)
    for _ in range(2):
        outcome = launcher.launch(job, files, {}, print)
        assert [decode_value(report.value) for report in outcome.reports] == [0, 1]


def executors() -> list[int]:
    """Return the process ids of this run's executors; for workers, which have no conftest."""
    marker, found = f"TFDIST_TEST_RUN={os.environ['TFDIST_TEST_RUN']}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            is_executor = b"CoarseGrainedExecutorBackend" in (entry / "cmdline").read_bytes()
            if is_executor and marker in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


class KillExecutor(keras.callbacks.Callback):
    """Kills one of the executors, once, within the second epoch."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        mark = Path(self.mark)
        if os.environ["TFDIST_RANK"] == "1" and (self.epoch, batch) == (1, 3) and not mark.exists():
            mark.touch()
            os.kill(executors()[0], signal.SIGKILL)
            threading.Event().wait(600)  # for its end: the next steps would be faster


@pytest.mark.full
def test_a_training_goes_on_when_an_executor_was_killed(
    spark: Any, rows: Any, tmp_path: Path, capsys: Any
) -> None:
    def train(**settings: Any) -> Any:
        killer = KillExecutor(str(tmp_path / "mark"))
        return barrier_train(
            spark,
            build_dense,
            frame(spark, *rows),
            epochs=2,
            batch_size=50,
            seed=4,
            callbacks=[killer],
            **settings,
        )

    found = train(recovery=Recovery(str(tmp_path / "kept"), every=2, restarts=1))
    said = capsys.readouterr().out
    assert "restarting from the newest checkpoint (restart 1 of 1)" in said
    assert "resumes from the checkpoint of epoch 2, step 3" in said
    whole = train(verbose=0)
    assert found.history == whole.history
    assert found.workers[0].weights_sha256 == whole.workers[0].weights_sha256


@pytest.mark.full
@pytest.mark.launcher
def test_slots_that_others_hold_end_the_wait(spark: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(spark_job, "_IDLE_SECONDS", 4)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)
    holders = socket.create_server(("127.0.0.1", 0))
    holders.settimeout(60)
    address = holders.getsockname()

    def hold(batches: Any) -> Any:
        import socket
        import time

        yield from batches
        with socket.create_connection(address):
            time.sleep(1000)

    def occupy() -> None:
        spark.sparkContext.setJobGroup("others", "holds all slots", interruptOnCancel=True)
        # It is cancelled below.
        with pytest.raises(Exception, match="cancelled"):
            spark.range(0, 2, 1, 2).mapInArrow(hold, "id long").collect()

    other = InheritableThread(target=occupy)
    other.start()
    try:
        held = [holders.accept()[0] for _ in range(2)]
        with pytest.raises(ClusterError, match="Spark is not running any task of this job"):
            barrier_run(spark, lambda context: 1, workers=2)
    finally:
        spark.sparkContext.cancelJobGroup("others")
        other.join(timeout=60)
    assert not other.is_alive()
    for connection in (*held, holders):
        connection.close()


@pytest.mark.launcher
def test_a_python_that_no_executor_has_is_named(spark: Any) -> None:
    context, before = spark.sparkContext, spark.sparkContext.pythonExec
    context.pythonExec = "/nowhere/python3"
    try:
        with pytest.raises(
            ClusterError, match="set PYSPARK_PYTHON to a Python that exists"
        ) as told:
            barrier_run(spark, lambda context: context.rank, workers=2)
    finally:
        context.pythonExec = before
    assert "/nowhere/python3" in str(told.value)


@pytest.mark.full
@pytest.mark.launcher
def test_an_executor_with_another_minor_version_of_python_is_named(
    spark: Any, tmp_path: Path
) -> None:
    # Claims to have another version; everything else continues to work.
    (tmp_path / "sitecustomize.py").write_text(
        "import collections, sys\n"
        "names = 'major minor micro releaselevel serial'\n"
        "sys.version_info = collections.namedtuple('V', names)(3, 99, 0, 'final', 0)\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    context, before = spark.sparkContext, spark.sparkContext.pythonExec
    context.pythonExec = str(python)
    try:
        with pytest.raises(ClusterError, match="same minor version of Python on driver"):
            barrier_run(spark, lambda context: context.rank, workers=2)
    finally:
        context.pythonExec = before


@pytest.mark.launcher
def test_executors_get_this_very_package(spark: Any) -> None:
    def work(context: WorkerContext) -> str:
        import pybackend

        return pybackend.__file__

    for path in barrier_run(spark, work, workers=2):
        assert path != pybackend.__file__
        assert ".zip" in path


def test_a_second_application_beside_this_one_is_refused(spark: Any) -> None:
    with pytest.raises(ClusterError, match=spark.sparkContext.applicationId) as caught:
        attach_spark(1, "secret")
    assert "not through sparklyr: pass its session instead, or stop it with its stop()" in str(
        caught.value
    )


def test_each_jvm_of_sparklyr_has_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(port: int, *_: Any) -> Any:
        sys.modules["pretended.session"] = ModuleType(f"of {port}")
        return f"session {port}"

    monkeypatch.setattr(sparklyr, "_FORGOTTEN", ("pretended",))
    monkeypatch.setattr(sparklyr, "_attached", {})
    monkeypatch.setattr(sparklyr, "_loaded", None)
    monkeypatch.setattr(sparklyr, "_attach", join)
    monkeypatch.setattr(sparklyr, "_reject_foreign_session", lambda: None)
    ended: set[str] = set()
    monkeypatch.setattr(sparklyr, "_is_alive", lambda session: session not in ended)
    try:
        first = attach_spark(1, "secret"), sys.modules["pretended.session"]
        sys.modules["pretended.later"] = ModuleType("later")
        assert attach_spark(2, "secret") == "session 2"
        assert sys.modules["pretended.session"].__name__ == "of 2"
        assert "pretended.later" not in sys.modules
        assert (attach_spark(1, "secret"), sys.modules["pretended.session"]) == first
        assert "pretended.later" in sys.modules
        ended.add("session 1")
        assert attach_spark(2, "secret") == "session 2"
        assert attach_spark(1, "secret") == "session 1"
        assert sys.modules["pretended.session"] is not first[1]
    finally:
        for name in ("pretended.session", "pretended.later"):
            sys.modules.pop(name, None)


# A process has one Spark, which the other tests use.
OTHER_SESSIONS = """
import os, tempfile
from pathlib import Path
from conftest import spark_session, wait_for
import pybackend
from pybackend.core.launchers.spark import barrier, explain
from pybackend.spark_tensorflow_distributor import MirroredStrategyRunner
token = barrier.new_token()
barrier.new_token = lambda: token
def threads(context):
    return os.environ["TF_NUM_INTRAOP_THREADS"]
with tempfile.TemporaryDirectory() as folder:
    settings = {"spark__eventLog__enabled": "true", "spark__eventLog__dir": folder,
                "spark__eventLog__compress": "false", "spark__eventLog__rolling__enabled": "false",
                "spark__ssl__enabled": "true"}
    with spark_session("local[4]", **settings) as session:
        print(pybackend.barrier_run(session, threads, workers=2, verbose=0))
        try:
            MirroredStrategyRunner(num_slots=1, use_gpu=False).run(print)
        except pybackend.ClusterError as error:
            print(error)
        shown = [*session.sparkContext.getConf().getAll(), *session.sql("SET").collect()]
        print("settings", "spark.app.name" in str(shown), token in str(shown))
        for count, *levels in ((2, "DEBUG", "INFO"), (1, "OFF", "ERROR")):
            explain._set_levels(session, dict(zip(explain._LOGGERS, levels, strict=True)))
            with explain.quiet_log(session):
                pass
            wait_for(lambda: len(explain._levels(session)) == count)
            print("levels", *explain._levels(session).values())
    (events,) = [path.read_text() for path in Path(folder).iterdir() if path.is_file()]
    print("log", *(text in events for text in ("spark.app.name", "tfdist", token)))
try:
    pybackend.barrier_run(session, threads, workers=1)
except pybackend.ClusterError as error:
    print(error)
"""


def run_program(text: str, *arguments: str) -> str:
    """Return the output of a separate program."""
    import subprocess

    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
        cwd=os.path.dirname(__file__),
        # Without an archive of classes, which makes Java list methods in another order.
        env={
            **os.environ,
            "PYTHONPATH": str(Path(pybackend.__file__).parents[1]),
            "SPARK_SUBMIT_OPTS": "",
        },
    ).stdout


@pytest.fixture(scope="module")
def shown() -> str:
    """Return the output of a program that uses them."""
    return run_program(OTHER_SESSIONS)


@pytest.mark.full
def test_workers_of_a_local_session_divide_its_cores(shown: str) -> None:
    cores = min(4, os.cpu_count() or 1) // 2
    assert str([str(cores)] * 2) in shown


@pytest.mark.full
def test_sparks_log_of_events_which_its_pages_show_has_no_token(shown: str) -> None:
    assert "log True True False" in shown
    assert "settings True False" in shown


@pytest.mark.full
def test_a_session_that_asks_for_encryption_gets_no_servers_without(shown: str) -> None:
    assert "spark.ssl.enabled is true, but TensorFlow's own servers do not encrypt" in shown


@pytest.mark.full
def test_a_stopped_session_is_named(shown: str) -> None:
    assert shown.count("it was stopped") == 1


PROFILES = """
import os, sys
from conftest import spark_session
import pybackend
from pybackend import Resources

def resources_of(context):
    names = ("TF_NUM_INTRAOP_THREADS", "CUDA_VISIBLE_DEVICES")
    return [os.environ.get(name) for name in names]

settings = {"spark__worker__resource__gpu__amount": "2",
            "spark__worker__resource__gpu__discoveryScript": sys.argv[1],
            "spark__executor__resource__gpu__amount": "2"}
with spark_session("local-cluster[2,2,1024]", **settings) as session:
    def try_run(workers, **wanted):
        limits = Resources(**wanted) if wanted else None
        try:
            print(wanted, pybackend.barrier_run(
                session, resources_of, workers=workers, resources=limits, verbose=0))
        except (pybackend.InputError, pybackend.ClusterError) as error:
            print(wanted, type(error).__name__, error)
    try_run(4)
    try_run(2, cpus=2)
    try_run(2, gpus=2)
    try_run(2, cpus=2, gpus=1)
    try_run(3, cpus=2)
    try_run(3, gpus=2)
    try_run(1, cpus=3)
    try_run(1, gpus=3)
    print("tasks of others:", session.range(0, 4, 1, 4).count())
"""


def test_a_training_stage_has_its_own_resources(tmp_path: Path) -> None:
    script = tmp_path / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["4", "7"]}'\n""")
    script.chmod(0o755)
    shown = run_program(PROFILES, str(script)).splitlines()
    assert shown == [
        "{} " + str([["1", "-1"]] * 4),
        "{'cpus': 2} " + str([["2", "-1"]] * 2),
        "{'gpus': 2} " + str([["1", "4,7"]] * 2),
        "{'cpus': 2, 'gpus': 1} " + str([["2", "4"]] * 2),
        "{'cpus': 2} ClusterError `workers` is 3, but this Spark session runs at most 2 tasks with "
        "2 cores each at a time (master local-cluster[2,2,1024]): use at most 2, or start the "
        "session with more executors or cores",
        "{'gpus': 2} ClusterError `workers` is 3, but this Spark session runs at most 2 tasks with "
        "2 GPUs each at a time (master local-cluster[2,2,1024]): use at most 2, or start the "
        "session with more executors or cores",
        "{'cpus': 3} ClusterError `workers` is 1, but this Spark session runs at most 0 tasks with "
        "3 cores each at a time (master local-cluster[2,2,1024]): request fewer of them in "
        "`resources`, or start the session with more executors or cores",
        "{'gpus': 3} InputError each worker needs 3 gpus (resources=Resources(gpus=3)), but an "
        "executor of this Spark session has 2: start the session with "
        "spark.executor.resource.gpu.amount=3",
        "tasks of others: 4",
    ]


DYNAMIC_ALLOCATION = """
from conftest import spark_session
import pybackend
settings = {"spark__dynamicAllocation__enabled": "true",
            "spark__dynamicAllocation__shuffleTracking__enabled": "true"}
with spark_session("local-cluster[1,1,1024]", **settings) as session:
    try:
        pybackend.barrier_run(session, lambda context: None, workers=1)
    except pybackend.ClusterError as error:
        print(error)
"""


@pytest.mark.full
def test_dynamic_allocation_is_refused() -> None:
    assert "barrier mode does not work with it" in run_program(DYNAMIC_ALLOCATION)


@pytest.mark.full
def test_levels_of_sparks_loggers_are_kept(shown: str) -> None:
    assert "levels DEBUG WARN\n" in shown
    assert "levels ERROR\n" in shown  # the other one is still OFF


@pytest.mark.parametrize(
    ("before", "after"), [("WARN", "WARN"), ("INFO", "WARN"), ("DEBUG", "DEBUG"), ("OFF", "OFF")]
)
def test_sparks_loggers_return_to_their_level(spark: Any, before: str, after: str) -> None:
    manager = spark.sparkContext._jvm.org.apache.logging.log4j.LogManager
    loggers = [manager.getLogger(name) for name in explain._LOGGERS]
    (told,) = explain._evaluate(spark, [f"'{explain._LOG4J}.LogManager', 'getLogger', 'a.b'"])
    if not told.startswith("a.b:"):  # SQL asks for the logger of all texts: the root's counts
        after = manager.getRootLogger().getLevel().toString()
    explain._set_levels(spark, dict.fromkeys(explain._LOGGERS, before))
    try:
        with explain.quiet_log(spark):
            assert [logger.getLevel().toString() for logger in loggers] == ["OFF", "OFF"]
        wait_for(lambda: [one.getLevel().toString() for one in loggers] == [after, after])
    finally:
        explain._set_levels(spark, dict.fromkeys(explain._LOGGERS, "ERROR"))


@pytest.fixture
def stop_driver(spark: Any, monkeypatch: Any) -> Iterator[Any]:
    """Stop Spark's JVM until the test ends; the limit for an answer is two seconds."""
    java = spark.sparkContext._gateway.proc.pid
    monkeypatch.setattr(session_module, "ANSWER_SECONDS", 2)
    yield lambda: os.kill(java, signal.SIGSTOP)
    os.kill(java, signal.SIGCONT)


def test_a_driver_that_does_not_answer_is_named(spark: Any, stop_driver: Any) -> None:
    stop_driver()
    with pytest.raises(ClusterError, match=r"\(its Java process\) does not answer: .* 2 s"):
        barrier_run(spark, lambda context: 1, workers=1)


def test_a_driver_that_stops_before_a_job_starts_is_named(spark: Any, stop_driver: Any) -> None:
    job = spark_job.ClassicJob(spark)
    stop_driver()
    with pytest.raises(ClusterError, match=r"does not answer: .* the start of a job"):
        job.start(lambda: None)


def test_a_job_inherits_the_properties_of_the_calling_thread(spark: Any) -> None:
    context = spark.sparkContext
    context.setLocalProperty("spark.scheduler.pool", "mine")
    try:
        pool = spark_job.run_watched(
            spark, lambda: context.getLocalProperty("spark.scheduler.pool")
        )
    finally:
        context.setLocalProperty("spark.scheduler.pool", None)
    assert pool == "mine"
