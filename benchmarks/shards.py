"""Memory and time with the optimizer's state in parts: 49 million weights, Adam, 2 and 4 workers.

Adam has 2 P bytes of state for P bytes of weights; in N parts, a worker has 2 P / N. Each case is
measured in the same rounds as the whole state on every worker, and compared with this arithmetic.
The peak does not include worker 0, which writes the model.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import large
import numpy as np

import pybackend
from pybackend import Exchange

BATCH, STEPS, EPOCHS = 16, 4, 3
STATE_MB = 2 * 4 * large.PARAMETERS / 1e6
Figures = dict[str, float]


def network() -> Any:
    """Return the dense layers of `large`, with Adam."""
    import keras

    model = large.network()
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return model


def recorder(folder: str) -> Any:
    """Return a callback that writes each worker's time, memory, and size of the state."""
    import keras

    class Recorder(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            milliseconds = (time.perf_counter() - self.began) / self.params["steps"] * 1e3
            state = sum(v.numpy().nbytes for v in self.model.optimizer.variables) / 1e6
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
            figures = {"ms": milliseconds, "state_mb": state, "peak_mb": peak}
            Path(folder, f"{os.environ['TFDIST_RANK']}.json").write_text(json.dumps(figures))

    return Recorder()


def train(workers: int, is_sharded: bool) -> list[Figures]:
    """Return the figures of the last epoch, by rank."""
    rng = np.random.default_rng(0)
    rows = BATCH * STEPS * workers
    data = rng.random((rows, large.WIDTH), "float32"), rng.random((rows, 1), "float32")
    with tempfile.TemporaryDirectory() as folder:
        pybackend.barrier_train(
            "local",
            network,
            data,
            workers=workers,
            batch_size=BATCH,
            epochs=EPOCHS,
            exchange=Exchange(shard_optimizer=is_sharded, audit=False),
            callbacks=[recorder(folder)],
            model_uri=f"{folder}/model.h5",
            verbose=0,
        )
        paths = [Path(folder, f"{rank}.json") for rank in range(workers)]
        return [json.loads(path.read_text()) for path in paths]


def measure(rounds: int) -> dict[str, dict[str, Figures]]:
    """Medians over interleaved rounds; of the ranks, the largest state and peak."""
    found: dict[tuple[int, bool], list[Figures]] = {}
    for _ in range(rounds):
        for workers in (2, 4):
            for is_sharded in (False, True):
                ranks = train(workers, is_sharded)
                figures = {
                    "ms_per_step": ranks[0]["ms"],
                    "state_mb": max(one["state_mb"] for one in ranks),
                    "peak_mb": max(one["peak_mb"] for one in ranks[1:]),
                }
                found.setdefault((workers, is_sharded), []).append(figures)
    middle = {
        case: {name: float(np.median([f[name] for f in all_rounds])) for name in all_rounds[0]}
        for case, all_rounds in found.items()
    }
    return {"optimizer's state in parts, 49 million weights, Adam": _list_rows(middle)}


def _list_rows(middle: dict[tuple[int, bool], Figures]) -> dict[str, Figures]:
    rows = {}
    for (workers, is_sharded), figures in middle.items():
        expected = STATE_MB / (workers if is_sharded else 1)
        less = middle[workers, False]["peak_mb"] - figures["peak_mb"]
        rows[f"{workers} workers, {'in parts' if is_sharded else 'whole'}"] = {
            **figures,
            "state_by_arithmetic_mb": expected,
            "less_than_whole_mb": less,
            "less_by_arithmetic_mb": STATE_MB - expected,
        }
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(1), indent=1))
