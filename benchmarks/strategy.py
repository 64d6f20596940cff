"""Asynchronous training on a parameter server compared with synchronous training, two workers each.

Network, digits, batches and learning rate are the same; the accuracy is that of the test images.
"""

from __future__ import annotations

import io
import time
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import rounds as turns
import step

import pybackend

IMAGES, EPOCHS = 12_800, 4
CASES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "parameter_server": {"exchange": pybackend.ParameterServer()},
}
Table = dict[str, dict[str, float]]


class _Epochs(io.StringIO):
    """Standard output that records the times of reported epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def write(self, text: str) -> int:
        if text.startswith("epoch "):
            self.ends.append(time.perf_counter())
        return super().write(text)


def build() -> Any:
    """Return the network of the other benchmarks."""
    import keras

    return step.network(keras)


def train(options: dict[str, Any]) -> dict[str, float]:
    """Train once; return the speed of all epochs but the first, and the accuracy."""
    digits = pybackend.mnist(limit=IMAGES)
    images = {
        k: getattr(digits, k)[..., None].astype("float32") / 255 for k in ("x_train", "x_test")
    }
    with redirect_stdout(_Epochs()) as output:
        result = pybackend.barrier_train(
            "local",
            build,
            (images["x_train"], digits.y_train),
            workers=step.WORKERS,
            epochs=EPOCHS,
            batch_size=step.BATCH,
            **options,
        )
    each = float(np.mean(np.diff(output.ends)))
    figures = result.model.evaluate(images["x_test"], digits.y_test, verbose=0, return_dict=True)
    return {
        "images/s": len(digits.x_train) / each,
        "steps/s": result.workers[0].steps / EPOCHS / each,
        "test accuracy, %": 100 * figures["accuracy"],
    }


def measure(rounds: int) -> dict[str, Table]:
    """Return medians over interleaved rounds."""
    found = turns.interleaved({n: lambda o=o: train(o) for n, o in CASES.items()}, rounds)
    table = {
        name: {figure: float(np.median([one[figure] for one in all_])) for figure in all_[0]}
        for name, all_ in found.items()
    }
    images = len(pybackend.mnist(limit=IMAGES).x_train)
    return {f"strategy, {images} digits, {EPOCHS} epochs, 2 workers x 64 images": table}
