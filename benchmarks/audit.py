"""Cost of an audit, and what it finds.

Cost: seconds of a training and memory of worker 0, with an audit and without. Three networks on two
workers: the small CNN, one of 49 million weights, and one of 500 layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import large
import numpy as np
import rounds as turns
import step

import pybackend

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
EPOCHS, STEPS, DEPTH, WIDTH = 3, 8, 500, 16


def deep() -> Any:
    """Small dense layers, one after the other."""
    import keras

    x = inputs = keras.Input((WIDTH,))
    for _ in range(DEPTH // 2):
        x = keras.layers.Add()([x, keras.layers.Dense(WIDTH, activation="tanh")(x)])
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


def seeds() -> Any:
    """Return the small CNN."""
    import keras

    return step.network(keras)


def numbers(width: int, rows: int) -> tuple[Any, Any]:
    """Random rows for a regression."""
    rng = np.random.default_rng(0)
    return rng.random((rows, width), "float32"), rng.random((rows, 1), "float32")


NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    "seed's network": (seeds, step.digits, step.BATCH),
    "49 million weights": (large.network, large.rows, large.BATCH),
    "500 layers": (deep, lambda: numbers(WIDTH, 2 * 32 * STEPS), 32),
}


def train(name: str, audit: bool) -> dict[str, float]:
    """Return measurements of worker 0 in one training."""
    build, rows, batch = NETWORKS[name]

    import keras

    class Peak(keras.callbacks.Callback):
        """Records the peak memory in the logs of an epoch."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            import resource

            logs["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    result = pybackend.barrier_train(
        "local",
        build,
        rows(),
        workers=step.WORKERS,
        batch_size=batch,
        epochs=EPOCHS,
        callbacks=[Peak()],
        exchange=pybackend.Exchange(audit=audit),
        verbose=0,
    )
    return {"seconds": result.workers[0].seconds, "peak_mb": result.history["peak_mb"][-1]}


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over interleaved rounds."""
    cases = {
        f"{name}, {'with' if audit else 'without'}": lambda name=name, audit=audit: train(
            name, audit
        )
        for name in NETWORKS
        for audit in (False, True)
    }
    found = turns.interleaved(cases, min(rounds, 3))
    table = {
        case: {key: float(np.median([one[key] for one in each])) for key in each[0]}
        for case, each in found.items()
    }
    return {"a training of 3 epochs with and without an audit, 2 workers": table}


def find(_: int) -> dict[str, dict[str, dict[str, float]]]:
    """Verdicts on ordinary models, losses that combine rows, and faults; takes 15 minutes."""
    import test_audit_suite as suite

    names = ("trained", "different", "undecided", "equal")
    table = {
        label: dict(zip(names, map(float, (trained, *verdicts)), strict=True))
        for label, trained, _, *verdicts in suite.table()[1:]
    }
    return {"what the audit finds": table}
