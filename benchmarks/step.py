"""Milliseconds and CPU per training step: tfdist compared with its references, two workers each.

The small CNN, 64 images per worker and step, one thread per worker.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pybackend

GRADIENT_BYTES = 4 * (9 * 32 + 32 + 13 * 13 * 32 * 64 + 64 + 640 + 10)
ROWS, BATCH, WORKERS, EPOCHS = 64 * 120 * 2, 64, 2, 4


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
    """Return a callback for either Keras that times the epochs, all but the first.

    It has no method for batches, because with one, tfdist's workers meet once more in each step.
    """

    class Stopwatch(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.epochs: list[dict[str, float]] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ended = time.perf_counter(), time.process_time()
            wall, cpu = np.subtract(ended, self.began) / self.params["steps"] * 1e3
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            self.epochs.append({"ms": wall, "cpu_ms": cpu, "peak_mb": peak})

        def on_train_end(self, logs: Any = None) -> None:
            if path is not None:
                rank = __import__("os").environ["TFDIST_RANK"]
                Path(path, f"{rank}.json").write_text(json.dumps(self.epochs[1:]))

    return Stopwatch()


def train(
    build: Any, data: Any, epochs: int = EPOCHS, others: Sequence[Any] = (), **options: Any
) -> list[dict[str, float]]:
    """Train by `barrier_train`, timed on every worker; ``others`` are further callbacks."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        pybackend.barrier_train(
            "local",
            build,
            data,
            epochs=epochs,
            callbacks=[stopwatch(keras.callbacks.Callback, folder), *others],
            verbose=0,
            **options,
        )
        return [e for path in sorted(Path(folder).iterdir()) for e in json.loads(path.read_text())]


def train_apart(
    build: Any, make_data: Any, batch_size: int, epochs: int = EPOCHS, exchanged: int = 0
) -> list[dict[str, float]]:
    """Train in two processes, each with plain Keras on its half.

    They send each other ``exchanged`` bytes after each step, and sum them, outside TensorFlow.
    """

    def work(context: pybackend.types.WorkerContext) -> Any:
        import keras

        from pybackend.core.engine.row_batches import RowBatches

        own = [stopwatch(keras.callbacks.Callback)]
        if exchanged:
            own.append(each_batch(keras.callbacks.Callback, connect(context), exchanged))
        x, y = make_data()
        half = slice(context.rank, len(x), WORKERS)
        columns = {"x": x[half], "y": y[half]}
        feed = RowBatches(columns, [len(columns["x"])], 0, batch_size, shuffle=True)
        del x, y
        build().fit(feed.dataset(), epochs=epochs, callbacks=own, verbose=0)
        return own[0].epochs[1:]

    return flat(pybackend.barrier_run("local", work, workers=WORKERS, verbose=0))


def connect(context: pybackend.types.WorkerContext) -> Any:
    """Connect the workers with each other; return their collective."""
    from pybackend.core.collective import join_mesh
    from pybackend.core.net.authentication import new_token
    from pybackend.core.net.rendezvous import address_of, listen

    server = listen("127.0.0.1")
    token = context.all_gather(new_token())[0]
    return join_mesh(server, context.all_gather(address_of(server)), context.rank, token, 60)


def each_batch(base: type, mesh: Any = None, exchanged: int = 0) -> Any:
    """Return a callback that sums some bytes over the workers after each step."""
    buffer = np.zeros(exchanged, np.uint8) if exchanged < 4 else np.zeros(exchanged // 4, "float32")

    class EachBatch(base):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if exchanged:
                mesh.all_reduce(buffer)

    return EachBatch()


def measure_tfdist(
    steps_per_execution: int = 1,
    workers: int = WORKERS,
    has_callback: bool = False,
    is_audited: bool = False,
    **exchange: Any,
) -> list[dict[str, float]]:
    """Train the small CNN by tfdist, by default with two workers and without audits.

    Audits take a few seconds of a training run, whatever its number of steps.
    """
    import keras

    return train(
        lambda: network(__import__("keras"), steps_per_execution),
        digits(),
        others=[each_batch(keras.callbacks.Callback)] if has_callback else [],
        workers=workers,
        batch_size=BATCH,
        exchange=pybackend.Exchange(audit=is_audited, **exchange),
    )


def measure_apart(steps_per_execution: int = 1, exchanged: int = 0) -> list[dict[str, float]]:
    """Train the small CNN in two processes, with nothing of tfdist in their steps."""
    return train_apart(
        lambda: network(__import__("keras"), steps_per_execution),
        digits,
        BATCH,
        exchanged=exchanged,
    )


def measure_multi_worker() -> list[dict[str, float]]:
    """Train with tf_keras and MultiWorkerMirroredStrategy, with the same global batch."""

    def work(context: pybackend.types.WorkerContext) -> Any:
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


ENGINES: dict[str, Callable[[], list[dict[str, float]]]] = {
    "two processes, no communication": measure_apart,
    "tfdist": measure_tfdist,
    "tfdist, steps_per_execution=10": lambda: measure_tfdist(10),
    "tfdist, with the audits of its first epochs": lambda: measure_tfdist(is_audited=True),
    "tfdist, transport=tf": lambda: measure_tfdist(transport="tf"),
    "tf_keras + MultiWorkerMirroredStrategy": measure_multi_worker,
}


# What a step of a synchronous training consists of.
PARTS: dict[str, Callable[[], list[dict[str, float]]]] = {
    "two processes that wait for each other": lambda: measure_apart(exchanged=1),
    "two processes that sum the same bytes": lambda: measure_apart(exchanged=GRADIENT_BYTES),
    "tfdist, with a callback after each batch": lambda: measure_tfdist(has_callback=True),
    "no communication, steps_per_execution=10": lambda: measure_apart(10),
}


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over interleaved rounds, all workers and all timed epochs."""
    found = compared({**ENGINES, **PARTS}, rounds)
    first = next(iter(ENGINES))
    return {
        "step, 2 workers x 1 thread, 64 images each": {name: found[name] for name in ENGINES},
        "parts of such a step": {name: found[name] for name in (first, *PARTS)},
    }


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
