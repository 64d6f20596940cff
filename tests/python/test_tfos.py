"""TensorFlowOnSpark's API on a real Spark: clusters that are fed, and clusters that read."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import marked_processes, shared_spark, wait_for, worker_processes
from pyspark.streaming import StreamingContext

from pybackend import (
    ClusterError,
    InputError,
    SerializationError,
    TfdistError,
    WorkerFailedError,
    barrier_run,
)
from pybackend.tfos import TFCluster, TFManager, TFNode

SPARK = TFCluster.InputMode.SPARK


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with shared_spark("local[2]") as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    wait_for(lambda: not worker_processes() and not members())


def members() -> dict[int, Path]:
    """Return the running members that this test run started, and their folders."""
    commands = ((pid, command.split(b"\0")) for pid, command in marked_processes())
    return {
        pid: Path(words[-3].decode())
        for pid, words in commands
        if any(b"feed.spark_task" in word for word in words)
    }


@pytest.fixture
def run(session: Any) -> Iterator[Callable[..., TFCluster.TFCluster]]:
    """Call `TFCluster.run` in the session; end what a failed test leaves."""
    made = []

    def start(map_fun: Any, args: Any, num_ps: int = 0, **options: Any) -> TFCluster.TFCluster:
        context = session.sparkContext
        made.append(TFCluster.run(context, map_fun, args, 2, num_ps, **options))
        return made[-1]

    yield start
    for cluster in made:
        with suppress(TfdistError):
            cluster.shutdown(timeout=0.1)


def count_rows(folder: str, ctx: Any) -> None:
    """Write the number of rows, their sum, and the number of arrays to a file."""
    feed = ctx.get_data_feed(input_mapping={"a": "x", "b": "y"})
    count, total, arrays = 0, 0.0, 0
    path = Path(folder, f"{ctx.job_name}-{ctx.task_index}")
    while not feed.should_stop():
        batch = feed.next_batch(1)
        count += len(batch["x"])
        arrays += len(batch["x"]) if type(batch["y"]) is not list else 0
        total += sum(batch["x"]) + sum(sum(y) for y in batch["y"])
        path.with_suffix(".partial").write_text(json.dumps([count, total, arrays]))
        path.with_suffix(".partial").replace(path)


def counted(folder: Path) -> list[float]:
    """Return the rows, their sum and the number of arrays, over all nodes."""
    found = [json.loads(path.read_text()) for path in folder.glob("*-?")]
    return [sum(column) for column in zip(*found, strict=True)]


@pytest.mark.full
def test_rows_come_from_rdds_tables_and_streams_that_still_run(
    session: Any, run: Any, tmp_path: Path
) -> None:
    context = session.sparkContext
    counts, source = tmp_path / "counts", tmp_path / "source"
    counts.mkdir()
    source.mkdir()
    cluster = run(count_rows, str(counts), input_mode=SPARK, master_node="chief")
    folders = members().values()
    assert [node["job_name"] for node in cluster.cluster_info] == ["chief", "worker"]
    assert len(list(folders)) == 2
    rows = [(float(n), [0.5, 1.0]) for n in range(101)]
    frame = session.createDataFrame(rows, "a double, b array<double>")
    cluster.train(context.parallelize(rows, 5), num_epochs=2)
    cluster.train(frame, num_epochs=1)
    wanted = [3 * 101, 3 * (5050 + 1.5 * 101), 101]  # only of the DataFrame
    wait_for(lambda: counted(counts) == wanted)

    stream = session.readStream.schema(frame.schema).json(str(source))
    query = stream.writeStream.foreachBatch(lambda df, _: cluster.train(df.rdd, 1)).start()
    for part in range(2):
        (source / f"{part}.partial").write_text('{"a": 1, "b": [2]}\n' * 10)
        (source / f"{part}.partial").rename(source / f"{part}.json")
        wanted = [wanted[0] + 10, wanted[1] + 30, wanted[2]]
        wait_for(lambda: counted(counts) == wanted)  # noqa: B023
        assert query.isActive
    query.stop()

    with pytest.warns(FutureWarning, match="DStream is deprecated"):
        streaming = StreamingContext(context, 0.5)
    batches = [context.parallelize(rows[:number], 2) for number in (5, 10)]
    cluster.train(streaming.queueStream(batches))
    streaming.start()
    wanted = [wanted[0] + 15, wanted[1] + 55 + 15 * 1.5, wanted[2]]
    wait_for(lambda: counted(counts) == wanted)
    streaming.stop(stopSparkContext=False, stopGraceFully=True)
    cluster.shutdown(streaming)
    assert counted(counts) == wanted
    wait_for(lambda: not any(folder.exists() for folder in folders))
    with pytest.raises(ClusterError, match="was shut down"):
        cluster.train(frame, num_epochs=1)


def test_inference_has_a_result_for_each_row_and_late_errors_are_raised(
    session: Any, run: Any
) -> None:
    def square(args: Any, ctx: Any) -> None:
        import numpy as np

        feed = TFNode.DataFeed(ctx.mgr, False)
        while not feed.should_stop():
            feed.batch_results(np.square(feed.next_batch(30)))
        if ctx.task_index == 1:
            raise ValueError("too late to be seen by a feeder")

    context = session.sparkContext
    cluster = run(square, None, input_mode=SPARK)
    rows = context.parallelize(range(1000), 7)
    results = cluster.inference(rows)
    assert results.map(int).collect() == [row * row for row in range(1000)]
    assert results.count() == 1000  # computed again, as everything lazy
    with pytest.raises(WorkerFailedError, match="too late to be seen"):
        cluster.shutdown()


def test_columns_that_arrow_holds_otherwise_than_spark_go_as_rows() -> None:
    for kind in ("double", "bigint", "string", "array<array<float>>"):
        assert TFCluster._is_plain(kind)
    for kind in ("vector", "timestamp", "binary", "array<date>", "struct<a:int>", "map<int,int>"):
        assert not TFCluster._is_plain(kind)


def test_terminate_ends_feeds_that_never_end(session: Any, run: Any) -> None:
    def take_few(args: Any, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        assert len(feed.next_batch(10)) == 10
        feed.terminate()
        assert feed.should_stop()

    context = session.sparkContext
    cluster = run(take_few, [], input_mode=SPARK)
    endless = context.parallelize(range(4), 4).flatMap(lambda _: itertools.count())
    cluster.train(endless, num_epochs=1)
    wait_for(lambda: cluster.server.done)
    cluster.shutdown()


def test_a_function_that_leaves_rows_behind_is_named(
    session: Any, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(args: Any, ctx: Any) -> None:
        ctx.get_data_feed().next_batch(10)

    context = session.sparkContext
    cluster = run(leave, [], input_mode=SPARK)
    with pytest.raises(InputError, match="`dataRDD` must be an RDD or a DataFrame, not list"):
        cluster.train([1, 2])
    with pytest.raises(SerializationError, match=r"^a row is a argparse\.Namespace, which"):
        cluster.train(context.parallelize([argparse.Namespace(a=1)], 1))
    cluster.train(context.parallelize(range(2000), 2), num_epochs=1)
    cluster.train(context.parallelize(range(2000), 2), num_epochs=1)
    assert (
        "returned before the rows ended: some rows may not have been used"
        in capsys.readouterr().out
    )
    cluster.shutdown()
    with pytest.raises(InputError, match="`map_fun` must be a function, not str"):
        run("leave", [])


@pytest.mark.full
def test_an_error_while_rows_are_fed_reaches_the_driver(session: Any, run: Any) -> None:
    def fail(args: Any, ctx: Any) -> None:
        ctx.get_data_feed().next_batch(10)
        raise RuntimeError("no such luck")

    context = session.sparkContext
    cluster = run(fail, [], input_mode=SPARK)
    endless = context.parallelize(range(2), 2).flatMap(lambda _: itertools.count())
    with pytest.raises(WorkerFailedError, match="RuntimeError: no such luck"):
        cluster.train(endless)
    with pytest.raises(WorkerFailedError, match="RuntimeError: no such luck"):
        cluster.shutdown()


@pytest.mark.full
def test_servers_end_when_the_chief_has_returned(session: Any, run: Any, tmp_path: Path) -> None:
    def be(folder: str, ctx: Any) -> None:
        config = json.loads(os.environ["TF_CONFIG"])["task"]
        assert ctx.tmp_socket.getsockname()[1] > 0
        ctx.release_port()
        while ctx.job_name == "chief" and not Path(folder, "0").exists():
            time.sleep(0.05)
        assert ctx.tmp_socket is None
        Path(folder, str(ctx.executor_id)).write_text(f"{config} {sorted(ctx.cluster_spec)}")
        if ctx.job_name == "ps":
            time.sleep(3600)

    cluster = run(be, str(tmp_path), 1, master_node="chief", release_port=False)
    assert cluster.tensorboard_url() is None
    cluster.shutdown()
    assert (tmp_path / "0").read_text() == "{'type': 'ps', 'index': 0} ['chief', 'ps']"
    assert (tmp_path / "1").read_text() == "{'type': 'chief', 'index': 0} ['chief', 'ps']"
    with pytest.raises(InputError, match="needs input_mode"):
        cluster.train(session.sparkContext.parallelize([1]))


@pytest.mark.full
def test_a_function_of_barrier_run_gets_rows(session: Any) -> None:
    def total(context: Any) -> list[float]:
        batches = list(context.feed(batch_size=4))
        assert max(len(batch["a"]) for batch in batches) <= 4
        return [
            sum(len(batch["a"]) for batch in batches),
            sum(float(batch["a"].sum() + batch["b"].sum()) for batch in batches),
        ]

    rows = [(n, [0.5, 1.0]) for n in range(21)]
    frame = session.createDataFrame(rows, "a int, b array<float>")
    for data in (frame, frame.rdd):
        found = barrier_run(session, total, workers=2, data=data, verbose=0)
        assert [sum(column) for column in zip(*found, strict=True)] == [21, 210 + 1.5 * 21]


def test_a_queue_of_items_feeds_as_well() -> None:
    manager = TFManager.start(b"key", ["input", "output"])
    assert TFManager.connect(manager.address, b"key") is manager
    with pytest.raises(InputError, match="did not start a manager"):
        TFManager.connect(manager.address, b"another key")
    for item in (1, 2, 3, None):
        manager.get_queue("input").put(item)
    feed = TFNode.DataFeed(manager)
    assert (feed.next_batch(2), feed.should_stop()) == ([1, 2], False)
    assert (feed.next_batch(2), feed.should_stop()) == ([3], True)
    manager.shutdown()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_executors": 1, "num_ps": 1}, "too few"),
        ({"master_node": "boss"}, "must be 'chief' or 'master'"),
        ({"input_mode": 2}, "one of InputMode"),
        ({"driver_ps_nodes": True}, "not supported"),
        ({"eval_node": True, "input_mode": SPARK}, "needs InputMode.TENSORFLOW"),
        ({"sc": "local"}, "must be a SparkContext"),
    ],
)
def test_arguments_that_are_wrong_are_named(
    session: Any, arguments: dict[str, Any], words: str
) -> None:
    valid = {"sc": session.sparkContext, "num_executors": 2, "num_ps": 0}
    with pytest.raises(InputError, match=words):
        TFCluster.run(map_fun=count_rows, tf_args=None, **{**valid, **arguments})
