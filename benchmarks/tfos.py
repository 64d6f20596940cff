"""Rows to tensors: a script for TensorFlowOnSpark, run by its release 2.2.5 and `pybackend.tfos`.

The original runs unchanged under Spark 4, TensorFlow 2.21 and Python 3.11 on three conditions: an
executor runs one task at a time, executors get the driver's address, and they have a route to the
internet, even if it is unreachable.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from tfos_script import start

BATCH = 64


def feed_seconds(session: Any, data: Any, rows: int, package: str = "tensorflowonspark") -> float:
    """Return the seconds from rows (image, label) to batches of tensors.

    Start and end of the cluster, about ten seconds, are not timed.

    Parameters
    ----------
    data
        An RDD; for `pybackend.tfos` also a DataFrame.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        cluster = start(session, _consume, folder, package)
        began = time.perf_counter()
        cluster.train(data, 1)
        seconds = time.perf_counter() - began
        cluster.shutdown(timeout=-1)
        counted = sum(int(path.read_text()) for path in Path(folder).iterdir())
    assert counted == rows, f"{counted} of {rows} rows have arrived"
    return seconds


def _consume(arguments: dict[str, str], context: Any) -> None:
    """Take batches until there are no more, as the "main" function of a worker."""
    import tensorflow as tf

    feed = context.get_data_feed(train_mode=True)
    count = 0
    while not feed.should_stop():
        batch = feed.next_batch(BATCH)
        if batch:
            x, y = tf.constant(_images(batch)), tf.constant([row[1] for row in batch])
            assert x.shape == (len(y), 784)
            count += len(y)
    Path(arguments["folder"], str(context.executor_id)).write_text(str(count))


def _images(batch: list[Any]) -> Any:
    import numpy as np

    if isinstance(batch[0][0], list):
        return np.array([row[0] for row in batch], np.float32)
    pixels = np.frombuffer(b"".join(row[0] for row in batch), np.uint8)
    return pixels.reshape(len(batch), -1).astype(np.float32)
