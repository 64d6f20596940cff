"""One of two processes that train over a link; prints the milliseconds of a step.

``python wan_worker.py MODE INDEX ADDRESS,ADDRESS``, where MODE is ``exact``, ``local`` or
``mirrored``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from step import network

import pybackend

BATCH = 64
# Steps of an epoch, and epochs, including the first one, which is not counted.
STEPS = {"exact": 30, "local": 500, "mirrored": 10}
EPOCHS = 3


def clock(base: type, path: str) -> Any:
    """Return a callback that writes the end times of epochs to a file."""

    class Clock(base):  # type: ignore[misc, valid-type]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if os.environ.get("TFDIST_RANK", "0") == "0":
                with Path(path).open("a") as file:
                    file.write(f"{time.monotonic()}\n")

    return Clock()


def rows(steps: int, workers: int) -> tuple[Any, Any]:
    """Return random images for some steps of all workers."""
    rng = np.random.default_rng(0)
    count = steps * BATCH * workers
    images = rng.integers(0, 255, (count, 28, 28, 1), dtype="uint8").astype("float32") / 255
    return images, rng.integers(0, 10, count)


def train(mode: str, path: str) -> None:
    """Train with tfdist, either exactly or with local steps."""
    import keras

    exchange = pybackend.Exchange()
    if mode == "local":
        exchange = pybackend.LocalSteps(STEPS[mode], 0.7, 0.9, compression="bf16")
    pybackend.barrier_train(
        None,
        network(keras),
        rows(STEPS[mode], 2),
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=1,
        exchange=exchange,
        callbacks=[clock(keras.callbacks.Callback, path)],
        verbose=0,
    )


def mirror(path: str) -> None:
    """Train with MultiWorkerMirroredStrategy."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    import tf_keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices(rows(STEPS["mirrored"], 2)).batch(2 * BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        model = network(tf_keras)
    model.fit(
        data.with_options(options),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[clock(tf_keras.callbacks.Callback, path)],
    )


def main(mode: str, index: str, addresses: str) -> None:
    """Train, and print the milliseconds of a step after the first epoch."""
    pybackend.join(addresses.split(","), int(index))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/epochs"
        if mode == "mirrored":
            mirror(path)
        else:
            train(mode, path)
        if index == "0":
            ends = [float(line) for line in Path(path).read_text().split()]
            print(1e3 * (ends[-1] - ends[0]) / (len(ends) - 1) / STEPS[mode], flush=True)
    # TensorFlow's servers may wait for each other at the end.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
