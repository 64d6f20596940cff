"""A script of TensorFlowOnSpark's that trains a model, run by 2.2.5 itself and by `pybackend.tfos`.

See `tfos` for the conditions under which the original runs.
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
# The original's error comes after three of these: Spark tries the task that feeds again, and nobody
# takes its rows. Its default is 600 s.
_FEED_TIMEOUT = 5


def train(session: Any, data: Any, package: str = "tensorflowonspark") -> Any:
    """The model of worker 0, trained on the rows (image, label) that have reached it.

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
    """Seconds from an exception in the function of worker 1 to the first call that raises one.

    That is the call that feeds, or, if Spark has given worker 1 no rows, the one that ends it all.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        cluster = start(session, _fail, folder, package)
        feeds = partial(cluster.train, data, 1, feed_timeout=_FEED_TIMEOUT)
        ends = partial(cluster.shutdown, timeout=-1)
        is_over = not _has_failed(feeds)
        assert not is_over or _has_failed(ends), "the function has not failed"
        seconds = time.time() - float(Path(folder, "failed").read_text())
        if not is_over:
            _has_failed(ends)
        return seconds


def start(session: Any, function: Callable[..., Any], folder: str, package: str) -> Any:
    """A cluster of either package, whose function gets a folder, and rows from Spark."""
    # By default it announces the address of the route to the internet.
    os.environ["TFOS_SERVER_HOST"] = session.conf.get("spark.driver.host")
    cluster_module = importlib.import_module(f"{package}.TFCluster")
    logging.getLogger().setLevel(logging.CRITICAL)  # it tells of every step
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
    except (Exception, SystemExit):  # the original ends the process
        return True
    return False


def dense_model() -> Any:
    """One layer, 784 numbers to 10 classes."""
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
