"""A training script for TensorFlowOnSpark, run by its release 2.2.5 and by `pybackend.tfos`.

The module `tfos` lists the conditions under which the original runs.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from standalone_session import WORKERS

BATCH = 256
# The original raises its error after three of these timeouts: Spark retries the feeding task,
# whose rows no worker takes. Its default is 600 s.
_FEED_TIMEOUT = 5


def train(session: Any, data: Any, package: str = "tensorflowonspark") -> Any:
    """Train a model on rows (image, label), and return that of worker 0.

    Parameters
    ----------
    data
        An RDD; for `pybackend.tfos` also a DataFrame.
    """
    import keras

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        cluster = start(session, _train, folder, package)
        cluster.train(data, 1)
        cluster.shutdown(timeout=-1)
        return keras.saving.load_model(Path(folder, "model.keras"))


def start_and_end(session: Any, package: str) -> None:
    """Start a cluster whose function does nothing, and end it."""
    start(session, _do_nothing, "", package).shutdown(timeout=-1)


def seconds_to_error(session: Any, data: Any, package: str) -> float:
    """Return seconds from an exception in worker 1's function to the first call that raises.

    This is the call that feeds, or, if worker 1 got no rows, the call that ends the cluster.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        cluster = start(session, _fail, folder, package)
        feeds = partial(cluster.train, data, 1, feed_timeout=_FEED_TIMEOUT)
        ends = partial(cluster.shutdown, timeout=-1)
        is_over = not _has_failed(feeds)
        assert not is_over or _has_failed(ends), "the function did not fail"
        seconds = time.time() - float(Path(folder, "failed").read_text())
        if not is_over:
            _has_failed(ends)
        return seconds


def start(session: Any, function: Callable[..., Any], folder: str, package: str) -> Any:
    """Start a cluster of either package, whose function gets a folder, and rows from Spark."""
    # By default it uses the address of the route to the internet.
    os.environ["TFOS_SERVER_HOST"] = session.conf.get("spark.driver.host")
    cluster_module = importlib.import_module(f"{package}.TFCluster")
    logging.getLogger().setLevel(logging.CRITICAL)  # it logs every step
    return cluster_module.run(
        session.sparkContext,
        function,
        {"folder": folder},
        num_executors=WORKERS,
        num_ps=0,
        input_mode=cluster_module.InputMode.SPARK,
    )


def _has_failed(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (Exception, SystemExit):  # the original exits the process
        return True
    return False


def dense_model() -> Any:
    """Return a model of one layer, from 784 numbers to 10 classes."""
    import keras

    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _train(arguments: dict[str, str], context: Any) -> None:
    feed = context.get_data_feed(train_mode=True, input_mapping={"image": "x", "label": "y"})
    model = dense_model()
    while not feed.should_stop():
        batch = feed.next_batch(BATCH)
        if len(batch["x"]):
            model.train_on_batch(np.asarray(batch["x"], np.float32), np.asarray(batch["y"]))
    if context.task_index == 0:
        model.save(Path(arguments["folder"], "model.keras"))


def _do_nothing(arguments: dict[str, str], context: Any) -> None:
    pass


def _fail(arguments: dict[str, str], context: Any) -> None:
    feed = context.get_data_feed(train_mode=True)
    feed.next_batch(1)
    if context.task_index == 1:
        Path(arguments["folder"], "failed").write_text(str(time.time()))
        raise ValueError("no such luck")
    while not feed.should_stop():
        feed.next_batch(BATCH)
