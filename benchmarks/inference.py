"""Rows per second of predictions by a small network: a DataFrame in Spark, compared with arrays.

One machine, a local Spark of two slots, DataFrames in Spark's memory, and predictions that are not
written. Compared is ``pyspark.ml.functions.predict_batch_udf``, which takes arrays of numbers, with
the same model, batch size and one thread, loaded once per process as in its manual. Measured warm:
every process has loaded its model. What a new process needs for its first rows is measured, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from feed import random_rows
from rounds import median_seconds

import pybackend

Table = dict[str, dict[str, float]]
ROWS, WIDTH, SLOTS, BATCH = 100_000, 784, 2, 256
NETWORKS = ("dense", "convolutional")
FIRST_ROWS = 1000
RUNTIMES = {"Keras": "keras", "ONNX Runtime": "onnx"}


def measure(rounds: int) -> dict[str, Table]:
    """Medians over interleaved rounds, after one that warms up, by network."""
    here = Path(__file__).parent
    sys.path.insert(0, str(here.parent / "tests" / "python"))
    from conftest import spark_session

    # Spark's processes create the DataFrames with the functions of these files.
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), *([given] if given else [])])
    os.environ["PYSPARK_PYTHON"] = sys.executable

    os.environ["TFDIST_TEST_FORGE"] = ""  # processes start as users' do, and are not forked
    with spark_session(f"local[{SLOTS}]", spark__driver__memory="4g") as session:
        frames = {kind: _cached(session, kind) for kind in ("binary", "array<float>")}
        found = {
            f"{ROWS:,} rows of {WIDTH} numbers, {name} network, {SLOTS} cores": _compared(
                name, frames, rounds
            )
            for name in NETWORKS
        }
    first: Table = {}
    for name, runtime in RUNTIMES.items():
        each = []
        for _ in range(rounds):
            with spark_session("local[1]") as session:
                each.append(_first_rows(session, runtime))
        first[name] = {key: float(np.median([one[key] for one in each])) for key in each[0]}
    return found | {f"the first {FIRST_ROWS:,} rows of a new process, dense network": first}


def _first_rows(session: Any, runtime: Any) -> dict[str, float]:
    """Seconds until a new Python process of Spark has predicted rows, and its peak memory."""
    rows = _random_frame(session, "array<float>", FIRST_ROWS, 1).cache()
    assert rows.count() == FIRST_ROWS
    scored = _predicted(network("dense"), rows, runtime=runtime)
    began = time.perf_counter()
    _run(scored)
    seconds = time.perf_counter() - began

    def peak(batches: Any) -> Any:
        import resource

        import pyarrow as pa

        for _ in batches:
            peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            yield pa.RecordBatch.from_pydict({"mb": [peak_kb / 1000]})

    (row,) = session.range(0, 1, 1, 1).mapInArrow(peak, "mb double").collect()
    return {"seconds": seconds, "peak_mb": row.mb}


def _compared(name: str, frames: dict[str, Any], rounds: int) -> Table:
    model = network(name)
    x = np.random.default_rng(0).random((ROWS, *model.input_shape[1:]), dtype="float32")
    bytes_of = {"image": ("uint8", (WIDTH,))}
    by_onnx = _predicted(model, frames["array<float>"], runtime="onnx")  # converted once
    cases: dict[str, Callable[[], Any]] = {
        "model.predict, arrays": lambda: model.predict(x, batch_size=BATCH, verbose=0),
        "predict_spark, binary": lambda: _run(_predicted(model, frames["binary"], bytes_of)),
        "predict_spark, array<float>": lambda: _run(_predicted(model, frames["array<float>"])),
        "predict_batch_udf, array<float>": lambda: _run(_by_udf(model, frames["array<float>"])),
        "predict_spark, array<float>, ONNX Runtime": lambda: _run(by_onnx),
    }
    middle = {case: ROWS / taken for case, taken in median_seconds(cases, rounds).items()}
    here = middle["model.predict, arrays"]
    return {case: {"rows_per_s": rate, "ratio": rate / here} for case, rate in middle.items()}


def network(name: str) -> Any:
    """Return a small network of ten outputs."""
    import keras

    layers = keras.layers
    if name == "dense":
        body = [keras.Input((WIDTH,)), layers.Dense(128, activation="relu")]
    else:
        body = [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ]
    return keras.Sequential([*body, layers.Dense(10)])


def _cached(session: Any, kind: str) -> Any:
    frame = _random_frame(session, kind, ROWS, 2 * SLOTS).cache()
    assert frame.count() == ROWS
    return frame


def _random_frame(session: Any, kind: str, rows: int, partitions: int) -> Any:
    return session.range(0, rows, 1, partitions).mapInArrow(
        lambda batches: random_rows(batches, kind), f"image {kind}, label long"
    )


def _predicted(model: Any, frame: Any, tensors: Any = None, runtime: Any = "keras") -> Any:
    return pybackend.predict_spark(
        model,
        frame,
        features=["image"],
        tensors=tensors,
        batch_size=BATCH,
        type="raw",
        runtime=runtime,
    )


def _by_udf(model: Any, frame: Any) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    content = pybackend.save_model(model, None, format="keras")
    shape = list(model.input_shape[1:])

    def load() -> Any:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        known = pybackend.load_model(content, compile=False)
        return lambda rows: known.predict_on_batch(rows)

    udf = predict_batch_udf(
        load, return_type=ArrayType(FloatType()), batch_size=BATCH, input_tensor_shapes=[shape]
    )
    return frame.withColumn(".pred", udf("image"))


def _run(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()
