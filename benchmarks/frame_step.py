"""Milliseconds per step of the small CNN with rows of a DataFrame, compared with arrays.

Both use `pybackend.barrier_train` on one Spark session. The whole training is timed, and nothing
else: this includes the first step, in which TensorFlow builds its graph, and reading the rows of
each epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import step
from feed import cached
from rounds import interleaved
from standalone_session import WORKERS, standalone_session

import pybackend

Table = dict[str, dict[str, float]]
EPOCHS = 8


def per_step(rounds: int) -> dict[str, Table]:
    """Medians over interleaved rounds and all workers, after a round that warms up."""
    with standalone_session() as session:
        frame = cached(session, "array<float>", step.ROWS)
        arrays = step.digits()
        cases: dict[str, Callable[[], list[float]]] = {
            "arrays": lambda: _train(session, arrays),
            "DataFrame of array<float>": lambda: _train(session, frame),
        }
        found = interleaved(cases, rounds)
    middle = {name: float(np.median(each)) for name, each in found.items()}
    table = {n: {"ms_per_step": ms, "ratio": ms / middle["arrays"]} for n, ms in middle.items()}
    return {f"step of rows from Spark, {WORKERS} workers, {step.BATCH} images each": table}


def _train(session: Any, data: Any) -> list[float]:
    def build() -> Any:
        import keras

        return step.network(keras)

    trained = pybackend.barrier_train(
        session, build, data, workers=WORKERS, epochs=EPOCHS, batch_size=step.BATCH, verbose=0
    )
    return [worker.seconds / worker.steps * 1e3 for worker in trained.workers]
