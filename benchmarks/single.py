"""One worker compared with plain Keras: milliseconds per step of the small CNN, all cores."""

from __future__ import annotations

from typing import Any

import step

import pybackend


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds and all timed epochs."""
    return step.compared(
        {"plain Keras": _plain, "tfdist, workers=1": lambda: step.measure_tfdist(workers=1)}, rounds
    )


def _plain() -> list[dict[str, float]]:
    def work(context: pybackend.types.WorkerContext) -> Any:
        import keras

        x, y = step.digits()
        watch = step.stopwatch(keras.callbacks.Callback)
        options: Any = {"epochs": step.EPOCHS, "batch_size": step.BATCH, "verbose": 0}
        step.network(keras).fit(x, y, callbacks=[watch], **options)
        return watch.epochs[1:]

    return step.flat(pybackend.barrier_run("local", work, workers=1, verbose=0))
