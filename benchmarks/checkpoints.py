"""What a checkpoint adds to a step: models of 1, 100 and 500 MB, two workers.

One dense layer with plain SGD, and a checkpoint after every step. The reference is a file of as
many bytes, written and synchronized in the same rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import step
from rounds import interleaved

from pybackend import Recovery

# Inputs and outputs of the layer, by the megabytes of its weights.
WIDTHS = {1: 500, 100: 5000, 500: 11_180}
STEPS, EPOCHS = 4, 2


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over interleaved rounds, by the size of the model."""
    table = {f"a model of {size} MB": _compared(width, rounds) for size, width in WIDTHS.items()}
    return {"a checkpoint after every step, 2 workers, this machine's disk": table}


def _compared(width: int, rounds: int) -> dict[str, float]:
    found = interleaved(
        {
            "step": lambda: _train(width, None),
            "step_and_checkpoint": lambda: _train(width, 1),
            "file": lambda: _write(4 * width**2),
        },
        rounds,
    )
    step_ms, with_ms, file_ms = (float(np.median(times)) for times in found.values())
    return {"step_ms": step_ms, "adds_ms": with_ms - step_ms, "file_ms": file_ms}


def _train(width: int, every: int | None) -> float:
    """Return milliseconds per step of the last epoch."""

    def build() -> Any:
        import keras

        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width, use_bias=False)])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
        return model

    rows = np.zeros((STEPS * step.WORKERS, width), np.float32)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        kept = Recovery(folder, every=every) if every else None
        options = {"workers": step.WORKERS, "batch_size": 1, "recovery": kept}
        epochs = step.train(build, (rows, rows), epochs=EPOCHS, **options)
    return float(np.median([epoch["ms"] for epoch in epochs]))


def _write(size: int) -> float:
    content = np.random.default_rng(0).bytes(size)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        began = time.perf_counter()
        with Path(folder, "file").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return 1e3 * (time.perf_counter() - began)
