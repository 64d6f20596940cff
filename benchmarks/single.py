"""One worker beside plain Keras: milliseconds per step of the seed's network, all cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import step

import pybackend


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds and all timed epochs."""
    cases = {"plain Keras": _plain, "tfdist, workers=1": lambda: step.measure_tfdist(workers=1)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name] += case()
    reference = float(np.median([e["ms"] for e in found["plain Keras"]]))
    return {
        name: {
            "ms_per_step": (ms := float(np.median([e["ms"] for e in epochs]))),
            "cpu_ms_per_step": float(np.median([e["cpu_ms"] for e in epochs])),
            "ratio": ms / reference,
        }
        for name, epochs in found.items()
    }


def _plain() -> list[dict[str, float]]:
    def work(context: pybackend.WorkerContext) -> Any:
        import keras

        x, y = step.digits()
        watch = step.stopwatch(keras.callbacks.Callback)
        options: Any = {"epochs": step.EPOCHS, "batch_size": step.BATCH, "verbose": 0}
        step.network(keras).fit(x, y, callbacks=[watch], **options)
        return watch.epochs[1:]

    return step.flat(pybackend.barrier_run("local", work, workers=1, verbose=0))
