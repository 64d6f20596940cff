"""The Spark launcher over Spark Connect, with a real server in its own process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyspark
import pytest
import test_elastic
import test_routes
from cloudpickle import register_pickle_by_value
from conftest import build_dense, largest_difference, wait_for, worker_processes
from connect import connect_server, new_session
from contract import System, contract
from killing import KillAt
from pythons import python_with

import pybackend
from pybackend import (
    ClusterError,
    Elastic,
    InputError,
    Recovery,
    Resources,
    WorkerFailedError,
    barrier_evaluate,
    barrier_predict,
    barrier_run,
    barrier_train,
    predict_spark,
    read_tfrecords,
    write_tfrecords,
)
from pybackend.core.launchers.spark import spark_jobs as spark_job
from pybackend.core.launchers.spark import stage as spark
from pybackend.core.launchers.spark.slots import check_slots, count_slots
from pybackend.types import WorkerContext

register_pickle_by_value(test_elastic)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    folder = tmp_path_factory.mktemp("connect")
    with connect_server(folder) as running, pytest.MonkeyPatch.context() as patch:
        # PySpark's functions detect their session by this variable, which would stay set.
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        yield running
    wait_for(lambda: not worker_processes())


@pytest.fixture(scope="module")
def url(server: tuple[str, subprocess.Popen[bytes]]) -> str:
    return server[0]


@pytest.fixture(scope="module")
def session(url: str) -> Iterator[Any]:
    session = new_session(url)
    yield session
    session.stop()


@pytest.fixture
def system(session: Any, url: str) -> System:
    expression = f"SparkSession.builder.remote({url!r}).getOrCreate()"
    return System(session, expression, "from pyspark.sql import SparkSession")


# The server continues without a client that is killed: only its connection may have failed.
TestContract = contract(without=["test_nothing_outlives_a_driver_that_is_killed"])


@pytest.mark.full
def test_arrays_give_the_same_weights_as_on_this_machine(
    session: Any, rows: Any, tmp_path: Path, capsys: Any
) -> None:
    x, y = rows[0][:203], rows[1][:203]
    killed = {
        "callbacks": [KillAt(rank=1, epoch=1, step=1, mark=tmp_path / "killed")],
        "recovery": Recovery(tmp_path / "kept", restarts=1),
    }
    arguments: dict[str, Any] = {
        "workers": 2,
        "epochs": 2,
        "batch_size": 40,
        "seed": 5,
        "validation_data": (x[:101], y[:101]),
    }
    there = barrier_train(session, build_dense, (x, y), **arguments, **killed)
    shown = capsys.readouterr().out
    assert "epoch 2/2" in shown  # live, from the workers
    assert "SIGKILL; restarting from the newest checkpoint (restart 1 of 1)" in shown
    here = barrier_train(None, build_dense, (x, y), **arguments, verbose=0)
    assert largest_difference(there.model, here.model) <= 1e-6
    assert there.history["val_loss"] == pytest.approx(here.history["val_loss"])
    assert sum(w.rows for w in there.workers) == 203

    found = barrier_evaluate(session, there.model, (x, y), workers=2, verbose=0)
    expected = there.model.evaluate(x, y, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)
    predicted = barrier_predict(session, there.model, x, workers=2, verbose=0)
    np.testing.assert_allclose(predicted, there.model.predict(x, verbose=0), atol=1e-6)


@pytest.mark.full
def test_workers_run_in_the_environment_of_the_call(
    session: Any, tmp_path: Path, capsys: Any
) -> None:
    def find(context: WorkerContext) -> list[str]:
        import numpy

        return [sys.executable, numpy.__file__]

    resources = pybackend.Resources(
        environment=python_with(tmp_path, "numpy", "cloudpickle").parents[1]
    )
    found = barrier_run(session, find, workers=2, resources=resources)
    assert "sending the Python environment" in capsys.readouterr().out
    assert all("/tfdist-environment-" in path for paths in found for path in paths)
    assert barrier_run(session, find, workers=2, resources=resources) == found
    assert "the Python environment" not in capsys.readouterr().out


@pytest.mark.skipif(
    int(pyspark.__version__[0]) < 4,
    reason=f"pip's pyspark {pyspark.__version__} has no Spark Connect server: before 4.0 that is "
    "a jar of its own, org.apache.spark:spark-connect of Maven",
)
@test_routes.languages
@pytest.mark.full
def test_a_model_of_either_language(session: Any, language: str) -> None:
    test_routes.check(test_routes.trained(session, test_routes.MODELS[language]))


@pytest.mark.full
def test_a_dataframe_is_every_row_once(session: Any) -> None:
    pairs = [(i / 40, 1 - i / 40, i % 3) for i in range(40)]
    data = session.createDataFrame(pairs, "a double, b double, kind int")
    data = data.selectExpr("a", "struct(b) AS s", "kind")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    result = barrier_train(
        session,
        model,
        data.orderBy("kind"),
        features=["a", "s.b"],
        label="kind",
        workers=2,
        epochs=2,
        batch_size=40,
        validation_data=data.select("kind", "s", "a").limit(10),
        verbose=0,
    )
    assert sum(w.rows for w in result.workers) == 40
    x = np.array([pair[:2] for pair in pairs], "float32")
    y = np.array([pair[2] for pair in pairs])
    # One step with all rows per epoch, so that the order of Spark's rows does not matter.
    history = model.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(result.history["loss"], history["loss"], rtol=1e-5)
    assert largest_difference(model, result.model) <= 1e-6
    assert len(result.history["val_loss"]) == 2


@pytest.mark.full
def test_predictions_beside_the_rows(session: Any, rows: Any, dense_model: Any) -> None:
    x = rows[0][:40]
    values = [(i, x[i].tolist()) for i in range(40)]
    data = session.createDataFrame(values, "id int, `my.x` array<double>")
    levels = ["a", "b", "c"]
    found = predict_spark(dense_model, data, features=["my.x"], levels=levels)
    found.createOrReplaceTempView("predictions")
    asked = "SELECT `.pred_class`, `.pred_a`, `.pred_b`, `.pred_c` FROM predictions ORDER BY id"
    got = [tuple(row) for row in session.sql(asked).collect()]
    expected = dense_model.predict(x, verbose=0)
    powers = np.exp(expected)
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose([row[1:] for row in got], probabilities, atol=1e-6)
    assert [row[0] for row in got] == [levels[code] for code in expected.argmax(axis=1)]


def fail_on_rank_1(context: WorkerContext) -> None:

    for _ in range(30):
        print("on the way " * 150)
    if context.rank == 1:
        raise KeyError("no such digit")
    signal.pause()


def refused(*arguments: Any, **settings: Any) -> Any:
    """Use a server at an unreachable address: the workers connect through Spark's allGather."""
    server = REAL_SERVER(*arguments, **settings)
    server.address = "127.0.0.1:9"
    return server


REAL_SERVER = spark.MeetingServer


@pytest.mark.full
def test_records_go_there_and_back(session: Any, tmp_path: Path) -> None:
    frame = session.range(0, 1000, 1, 2).selectExpr(
        "id", "int(id) AS number", "if(id % 3 = 0, null, array(id, 1)) AS pair"
    )
    written = write_tfrecords(frame, tmp_path / "data", compression="gzip")
    assert (written.rows, len(written.files)) == (1000, 2)
    assert not [name for name in os.listdir(tmp_path / "data") if name.startswith("_temp")]
    back = read_tfrecords(session, tmp_path / "data")
    assert back.schema.simpleString() == "struct<id:bigint,number:int,pair:array<bigint>>"
    assert sorted(map(str, back.collect())) == sorted(map(str, frame.collect()))


def test_vectors_become_records_of_arrays(session: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    frame = session.createDataFrame([(Vectors.dense([1.0, 2.5]),), (None,)], ["v"])
    write_tfrecords(frame, tmp_path / "data")
    back = read_tfrecords(session, tmp_path / "data")
    assert sorted(row.v or [] for row in back.collect()) == [[], [1.0, 2.5]]


@pytest.mark.full
def test_what_is_wrong_with_records_there_is_told_here(session: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`path`: there is no file or folder"):
        read_tfrecords(session, tmp_path / "nothing")
    with pytest.raises(InputError, match=r"column 'a' has a null .* row 0 .*\(partition \d\)$"):
        write_tfrecords(session.sql("SELECT array(null, 1) AS a"), tmp_path / "data")
    assert not (tmp_path / "data").exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        write_tfrecords(session.range(1), tmp_path / "file")


@pytest.mark.full
@pytest.mark.launcher
def test_failures_reach_a_client_out_of_reach_whole(session: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(spark, "MeetingServer", refused)
    with pytest.raises(WorkerFailedError, match="no such digit") as caught:
        barrier_run(session, fail_on_rank_1, workers=2, verbose=0)
    error = caught.value
    assert (error.rank, error.exception_type, error.host) == (1, "KeyError", "127.0.0.1")
    assert "fail_on_rank_1" in error.worker_traceback
    assert len(error.log) >= 30
    wait_for(lambda: not worker_processes())


@pytest.mark.full
@pytest.mark.launcher
def test_a_client_out_of_reach_gets_the_result(session: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(spark, "MeetingServer", refused)
    assert barrier_run(session, lambda context: context.rank, workers=2) == [0, 1]


def test_too_few_slots_are_told_at_once(session: Any) -> None:
    assert count_slots(session) == 2
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"`workers` is 3, .*at most 2 tasks.*master local\[2\]"):
        barrier_run(session, lambda context: 1, workers=3)
    assert time.monotonic() - began < 30  # not the minute of waiting for slots


@pytest.mark.full
def test_slots_that_others_hold_end_the_wait(session: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(spark_job, "_IDLE_SECONDS", 4)
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
        session.addTag("others")
        # It is interrupted below.
        with pytest.raises(Exception, match="OPERATION_CANCELED"):
            session.range(0, 2, 1, 2).mapInArrow(hold, "id long").collect()

    other = threading.Thread(target=occupy)
    other.start()
    try:
        held = [holders.accept()[0] for _ in range(2)]
        with pytest.raises(ClusterError, match="Spark is not running any task of this job"):
            barrier_run(session, lambda context: 1, workers=2)
    finally:
        session.interruptTag("others")
        other.join(timeout=60)
    assert not other.is_alive()
    for connection in (*held, holders):
        connection.close()


def test_dynamic_allocation_is_refused(url: str) -> None:
    session = new_session(url)
    session.conf.set("spark.sql.legacy.setCommandRejectsSparkCoreConfs", "false")
    session.conf.set("spark.master", "yarn")
    with pytest.raises(ClusterError, match="barrier mode does not work with it"):
        check_slots(session, 1)
    session.stop()


@pytest.mark.full
def test_a_training_stage_has_its_own_cores(
    tmp_path: Path, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")  # as `SparkSession.builder` does
    with connect_server(
        tmp_path,
        master="local-cluster[2,2,1024]",
        spark__dynamicAllocation__enabled="false",
        spark__executor__memory="512m",
    ) as (url, _):
        session = new_session(url)

        def threads(context: WorkerContext) -> str:
            return os.environ["TF_NUM_INTRAOP_THREADS"]

        assert barrier_run(session, threads, workers=4, verbose=0) == ["1"] * 4
        two = Resources(cpus=2)
        assert barrier_run(session, threads, workers=2, resources=two, verbose=0) == ["2"] * 2
        with pytest.raises(ClusterError, match="at most 2 tasks with 2 cores each"):
            barrier_run(session, threads, workers=3, resources=two)
        here, there = (
            barrier_train(place, build_dense, rows, workers=2, seed=1, resources=given, verbose=0)
            for place, given in (("local", None), (session, two))
        )
        assert largest_difference(here.model, there.model) <= 1e-6
        session.stop()


def test_a_stopped_session_is_named(url: str) -> None:
    session = new_session(url)
    session.stop()
    with pytest.raises(ClusterError, match="it was stopped"):
        barrier_run(session, lambda context: 1, workers=1)


@pytest.mark.full
def test_a_stage_of_spark_ml_trains_and_predicts(
    session: Any, dense_model: Any, rows: Any, tmp_path: Path
) -> None:
    from pybackend.ml import KerasEstimator, KerasModel

    values = [(i, x.tolist(), int(y)) for i, (x, y) in enumerate(zip(*rows, strict=True))][:40]
    data = session.createDataFrame(values, "id int, features array<double>, label int")
    fitted = KerasEstimator(dense_model, workers=1, seed=1).fit(data)
    fitted.save(str(tmp_path / "stage"))
    for stage in (fitted, KerasModel.load(str(tmp_path / "stage"))):
        got = stage.transform(data).orderBy("id").collect()
        expected = fitted.model.predict(rows[0][:40], verbose=0)
        shown = [row.rawPrediction.toArray() for row in got]
        np.testing.assert_allclose(shown, expected, atol=1e-6)
        assert [row.prediction for row in got] == expected.argmax(axis=1).tolist()


@pytest.mark.full
def test_a_killed_worker_of_an_elastic_training_is_replaced(session: Any, tmp_path: Path) -> None:
    killer = KillAt(0, 1, 2, tmp_path / "killed")
    stop = test_elastic.StopWhenJoined(tmp_path, number=2)
    settings = {"workers": Elastic(2, max=2), "epochs": 500, "verbose": 0}
    result = test_elastic.train(killer, stop, target=session, **settings)
    assert [generation.workers for generation in result.generations] == [[0, 1], [1], [1, 2]]
    test_elastic.check_exact(result)
