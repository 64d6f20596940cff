"""Overlap of communication and computing: a dense model of 50 million parameters, two workers.

Measured in the same rounds: the same step without communication, the all-reduce alone, and the peak
memory of a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import collective
import numpy as np
import step

from pybackend import Exchange

WIDTH, LAYERS, BATCH, STEPS, EPOCHS = 3500, 4, 128, 6, 3
ROWS = BATCH * STEPS * step.WORKERS


def count_parameters(layers: int) -> int:
    """Return the number of weights of `network`."""
    return layers * (WIDTH * WIDTH + WIDTH) + WIDTH + 1


PARAMETERS = count_parameters(LAYERS)


def rows() -> tuple[Any, Any]:
    """Return random numbers, because the arithmetic does not depend on them."""
    rng = np.random.default_rng(0)
    return rng.random((ROWS, WIDTH), dtype="float32"), rng.random((ROWS, 1), dtype="float32")


def network(layers: int = LAYERS) -> Any:
    """Return dense layers of one width with plain SGD, which has no state."""
    import keras

    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(WIDTH, activation="relu"))
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    return model


def measure_tfdist(bucket_mb: float | None = None) -> list[dict[str, float]]:
    """`barrier_train` with two workers."""
    options = {
        "workers": step.WORKERS,
        "batch_size": BATCH,
        "exchange": Exchange(bucket_mb=bucket_mb, audit=False),
    }
    return step.train(network, rows(), epochs=EPOCHS, **options)


def measure_exchange() -> list[dict[str, float]]:
    """Measure the all-reduce of as many gradients alone."""
    found = collective.pair("mesh", {"ms": (PARAMETERS * 4, 5)})
    return [{**figures, "cpu_ms": 0.0, "peak_mb": 0.0} for figures in found]


CASES: dict[str, Callable[[], list[dict[str, float]]]] = {
    "compute: no communication": lambda: step.train_apart(network, rows, BATCH, EPOCHS),
    "communication: all-reduce alone": measure_exchange,
    "tfdist": measure_tfdist,
    "tfdist, buckets of 5 MB": lambda: measure_tfdist(5),
    "tfdist, buckets of 25 MB": lambda: measure_tfdist(25),
    "tfdist, one buffer after the backward pass": lambda: measure_tfdist(float("inf")),
}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, both workers and all timed epochs."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, case in CASES.items():
            found[name] += case()
    middle = {
        name: {key: float(np.median([f[key] for f in figures])) for key in ("ms", "peak_mb")}
        for name, figures in found.items()
    }
    compute, communication, *_ = (figures["ms"] for figures in middle.values())
    return {
        name: {
            "ms_per_step": figures["ms"],
            "of_the_sum": figures["ms"] / (compute + communication),
            "peak_mb": figures["peak_mb"],
        }
        for name, figures in middle.items()
    }
