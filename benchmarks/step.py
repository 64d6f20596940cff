"""Milliseconds and CPU per training step: tfdist compared with its references, two workers each.

The small CNN, 64 images per worker and step, one thread per worker.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pybackend

ROWS, BATCH, WORKERS, EPOCHS = 64 * 60 * 2, 64, 2, 4


def digits() -> tuple[Any, Any]:
    """Return random images, because the arithmetic of a step does not depend on them."""
    rng = np.random.default_rng(0)
    return rng.random((ROWS, 28, 28, 1), dtype="float32"), rng.integers(0, 10, ROWS)


def network(keras: Any, steps_per_execution: int = 1) -> Any:
    """Return the same network for Keras 3 or tf_keras, with SGD and momentum."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.InputLayer((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def stopwatch(base: type, path: str | None = None) -> Any:
    """Return a callback for either Keras that times the steps of all epochs but the first."""

    class Stopwatch(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.epochs: list[dict[str, float]] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.first: tuple[int, float, float] | None = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            self.last = (batch, time.perf_counter(), usage.ru_utime + usage.ru_stime)
            self.first = self.first or self.last

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert self.first is not None
            steps = self.last[0] - self.first[0]
            self.epochs.append(
                {
                    "ms": (self.last[1] - self.first[1]) / steps * 1e3,
                    "cpu_ms": (self.last[2] - self.first[2]) / steps * 1e3,
                    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                }
            )

        def on_train_end(self, logs: Any = None) -> None:
            if path is not None:
                rank = __import__("os").environ["TFDIST_RANK"]
                Path(path, f"{rank}.json").write_text(json.dumps(self.epochs[1:]))

    return Stopwatch()


def train(build: Any, data: Any, epochs: int = EPOCHS, **options: Any) -> list[dict[str, float]]:
    """Train by `barrier_train`, timed on every worker."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        pybackend.barrier_train(
            "local",
            build,
            data,
            epochs=epochs,
            callbacks=[stopwatch(keras.callbacks.Callback, folder)],
            verbose=0,
            **options,
        )
        return [e for path in sorted(Path(folder).iterdir()) for e in json.loads(path.read_text())]


def train_apart(
    build: Any, make_data: Any, batch_size: int, epochs: int = EPOCHS
) -> list[dict[str, float]]:
    """Train in two processes that do not communicate, each with plain Keras on its half."""

    def work(context: pybackend.WorkerContext) -> Any:
        import keras

        from pybackend.engine.feed import Feed

        x, y = make_data()
        half = slice(context.rank, len(x), WORKERS)
        columns = {"x": x[half], "y": y[half]}
        feed = Feed(columns, [len(columns["x"])], 0, batch_size, shuffle=True)
        del x, y
        watch = stopwatch(keras.callbacks.Callback)
        build().fit(feed.dataset(), epochs=epochs, callbacks=[watch], verbose=0)
        return watch.epochs[1:]

    return flat(pybackend.barrier_run("local", work, workers=WORKERS, verbose=0))


def measure_tfdist(
    steps_per_execution: int = 1, workers: int = WORKERS, **options: Any
) -> list[dict[str, float]]:
    """Train the small CNN by tfdist, by default with two workers."""
    return train(
        lambda: network(__import__("keras"), steps_per_execution),
        digits(),
        workers=workers,
        batch_size=BATCH,
        **options,
    )


def measure_alone() -> list[dict[str, float]]:
    """Train the small CNN in two processes that do not communicate."""
    return train_apart(lambda: network(__import__("keras")), digits, BATCH)


def measure_multi_worker() -> list[dict[str, float]]:
    """Train with tf_keras and MultiWorkerMirroredStrategy, with the same global batch."""

    def work(context: pybackend.WorkerContext) -> Any:
        import tensorflow as tf
        import tf_keras

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = network(tf_keras)
        data = tf.data.Dataset.from_tensor_slices(digits()).batch(BATCH * WORKERS)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        watch = stopwatch(tf_keras.callbacks.Callback)
        model.fit(data.with_options(options), epochs=EPOCHS, callbacks=[watch], verbose=0)
        return watch.epochs[1:]

    return flat(pybackend.barrier_run("local", work, workers=WORKERS, verbose=0))


def flat(per_rank: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Return the epochs of all ranks."""
    return [epoch for epochs in per_rank for epoch in epochs]


ENGINES = {
    "two processes, no communication": measure_alone,
    "tfdist": measure_tfdist,
    "tfdist, steps_per_execution=10": lambda: measure_tfdist(10),
    "tfdist, transport=tf": lambda: measure_tfdist(exchange=pybackend.Exchange(transport="tf")),
    "tf_keras + MultiWorkerMirroredStrategy": measure_multi_worker,
}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, all workers and all timed epochs."""
    return compared(ENGINES, rounds)


def compared(
    cases: Mapping[str, Callable[[], list[dict[str, float]]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Run the cases in turns; ratios are to the first."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name] += case()
    reference = float(np.median([e["ms"] for e in next(iter(found.values()))]))
    return {
        name: {
            "ms_per_step": (ms := float(np.median([e["ms"] for e in epochs]))),
            "cpu_ms_per_step": float(np.median([e["cpu_ms"] for e in epochs])),
            "ratio": ms / reference,
        }
        for name, epochs in found.items()
    }
