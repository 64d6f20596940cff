"""Rows per second from a Spark DataFrame to tensors, and of batches made from them.

The DataFrames are in Spark's memory, so reading them costs nothing. Compared are the same rows only
drained, and TensorFlowOnSpark 2.2.5, which sends every row through a queue of Python objects.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tfos
from rounds import interleaved, median_seconds
from standalone_session import WORKERS, standalone_session

Table = dict[str, dict[str, float]]
ROWS, WIDTH, BATCH = 50_000, 784, 64
# TensorFlowOnSpark checks once per second whether all rows were consumed: many rows, so that this
# does not matter.
TFOS_ROWS = 20_000
KINDS = {"binary(784)": "binary", "array<float>, 784": "array<float>"}


def measure(rounds: int) -> dict[str, Table]:
    """Medians over interleaved rounds, after one that warms up, by kind of DataFrame."""
    with standalone_session() as session:
        return {
            f"a DataFrame's rows to tensors, {kind}, {WORKERS} workers": _compared(
                session, sql_type, rounds
            )
            for kind, sql_type in KINDS.items()
        }


def _compared(session: Any, sql_type: str, rounds: int) -> Table:
    frame, few = (cached(session, sql_type, rows) for rows in (ROWS, TFOS_ROWS))
    cases: dict[str, tuple[int, Callable[[], float]]] = {
        "drain": (ROWS, lambda: drain(frame)),
        "tfdist, as tensors on the worker's disk": (
            ROWS,
            lambda: tfdist_feed(session, frame, is_read=False),
        ),
        "tfdist, to training tensors": (ROWS, lambda: tfdist_feed(session, frame)),
        "TensorFlowOnSpark 2.2.5, InputMode.SPARK": (
            TFOS_ROWS,
            lambda: tfos.feed_seconds(session, few.rdd, TFOS_ROWS),
        ),
        "the same script, pybackend.tfos": (
            TFOS_ROWS,
            lambda: tfos.feed_seconds(session, few.rdd, TFOS_ROWS, "pybackend.tfos"),
        ),
        "the same script, pybackend.tfos, train(df)": (
            ROWS,
            lambda: tfos.feed_seconds(session, frame, ROWS, "pybackend.tfos"),
        ),
    }
    found = interleaved({name: case for name, (_, case) in cases.items()}, rounds)
    for used in (frame, few):
        used.unpersist()
    drained = float(np.median(found["drain"])) / ROWS
    return {
        name: {
            "rows": rows,
            "seconds": (taken := float(np.median(found[name]))),
            "rows_per_s": rows / taken,
            "ratio_to_drain": taken / rows / drained,
        }
        for name, (rows, _) in cases.items()
    }


def cached(session: Any, sql_type: str, rows: int) -> Any:
    """Return a DataFrame of random images and labels, half of it in each executor's memory."""
    made = session.range(0, rows, 1, WORKERS).mapInArrow(
        lambda batches: random_rows(batches, sql_type), f"image {sql_type}, label long"
    )
    frame = made.repartition(WORKERS).cache()
    assert frame.count() == rows
    return frame


def random_rows(batches: Iterable[Any], sql_type: str) -> Iterator[Any]:
    """Yield images of bytes, or of numbers from 0 to 1, for batches of ids."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    for batch in batches:
        shape = (batch.num_rows, WIDTH)
        if sql_type == "binary":
            pixels = rng.integers(0, 256, shape, np.uint8)
            images = pa.array([row.tobytes() for row in pixels], pa.binary())
        else:
            images = pa.array(list(rng.random(shape, np.float32)), pa.list_(pa.float32()))
        labels = pa.array(rng.integers(0, 10, len(images)))
        yield pa.RecordBatch.from_arrays([images, labels], names=["image", "label"])


def drain(frame: Any) -> float:
    """Return seconds until Python has seen every Arrow batch, in a barrier stage as in tfdist."""

    def count(batches: Iterable[Any]) -> Iterator[Any]:
        yield _number(sum(batch.num_rows for batch in batches))

    return _timed(frame, count)


def tfdist_feed(session: Any, frame: Any, is_read: bool = True) -> float:
    """Return seconds until every row was in a shuffled batch of tensors, or only stored."""
    from pybackend.core.data.rows import StoredRows
    from pybackend.core.launchers import small_batches

    def feed(batches: Iterable[Any]) -> Iterator[Any]:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            spool(batches, Path(folder))
            stored = Path(folder, "train")
            yield _number(visited(stored, BATCH) if is_read else len(StoredRows(stored)))

    with small_batches(session):
        return _timed(frame, feed)


def spool(batches: Iterable[Any], folder: Path) -> None:
    """Write a partition's rows as tfdist's tasks do, in the folder ``train``."""
    from pybackend.core.data.arrow import describe_schema
    from pybackend.core.data.column_groups import group_columns
    from pybackend.core.data.columns import ColumnSpec
    from pybackend.core.launchers.spark.barrier_task import RowsOfFrame

    batches = iter(batches)
    first = next(batches)
    kinds = describe_schema(first.schema)
    column_groups = group_columns(ColumnSpec(features=["image"]), kinds, "float32", "data")
    RowsOfFrame({"train": tuple(column_groups)}).spool(chain([first], batches), 0, folder)


def visited(folder: Path, batch_size: int, in_memory: bool = False) -> int:
    """Return the number of rows in a shuffled epoch over a row store."""
    from pybackend.core.data.rows import StoredRows
    from pybackend.core.engine.row_batches import RowBatches

    rows = StoredRows(folder, in_memory)
    feed = RowBatches(rows, [len(rows)], 0, batch_size, shuffle=True)
    return sum(len(y) for _, y in feed.dataset())


def _timed(frame: Any, task: Callable[[Iterable[Any]], Iterator[Any]]) -> float:
    began = time.perf_counter()
    counted = frame.repartition(WORKERS).mapInArrow(task, "rows long", barrier=True).collect()
    seconds = time.perf_counter() - began
    assert sum(row["rows"] for row in counted) == ROWS
    return seconds


def _number(rows: int) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array([rows])], names=["rows"])


def shuffled(rounds: int) -> dict[str, Table]:
    """Measure batches in one process: medians over interleaved rounds, after a first one."""
    return {
        f"batches of {size}, rows of {WIDTH} bytes": _batches(size, rounds) for size in (64, 1024)
    }


def _batches(batch_size: int, rounds: int) -> Table:
    import tensorflow as tf

    from pybackend.core.data.row_store import write_columns
    from pybackend.core.data.rows import StoredRows
    from pybackend.core.engine.row_batches import RowBatches

    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (ROWS, WIDTH), np.uint8)
    y = rng.integers(0, 10, ROWS)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        write_columns(Path(folder, "train"), {"x": x, "y": y})
        columns = StoredRows(Path(folder, "train"))
        cases = {
            "tf.data, in order": tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size),
            "tfdist, shuffled": RowBatches(columns, [ROWS], 0, batch_size, shuffle=True).dataset(),
        }
        middle = median_seconds({n: partial(_visit, data) for n, data in cases.items()}, rounds)
    rates = {name: ROWS / taken for name, taken in middle.items()}
    reference = next(iter(rates.values()))
    return {name: {"rows_per_s": r, "ratio": r / reference} for name, r in rates.items()}


def _visit(dataset: Any) -> None:
    assert sum(len(labels) for _, labels in dataset) == ROWS
