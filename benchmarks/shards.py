"""Memory and time with the optimizer's state in parts: Adam, 49 and 245 million weights.

Adam has 2 P bytes of state for P bytes of weights; in N parts, a worker has 2 P / N. Each case is
measured in the same rounds as the whole state on every worker, and compared with this arithmetic.
The larger network is trained once, by 2 workers: 4 with the whole state need more than 24 GiB.
The peak does not include worker 0, which writes the model.

``python benchmarks/shards.py peaks`` measures the peaks of all workers until they end, with the
audit and without, for docs/machines.md.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import large
import numpy as np

import pybackend
from pybackend import Exchange

BATCH, STEPS, EPOCHS = 16, 4, 3
# Workers and layers.
CASES, LARGE = ((2, 4), (4, 4)), (2, 20)
Figures = dict[str, float]


def network(layers: int) -> Any:
    """Return the dense layers of `large`, with Adam."""
    import keras

    model = large.network(layers)
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


def train(workers: int, layers: int, is_sharded: bool) -> list[Figures]:
    """Return the figures of the last epoch, by rank."""
    rng = np.random.default_rng(0)
    rows = BATCH * STEPS * workers
    data = rng.random((rows, large.WIDTH), "float32"), rng.random((rows, 1), "float32")
    with tempfile.TemporaryDirectory() as folder:
        pybackend.barrier_train(
            "local",
            partial(network, layers),
            data,
            workers=workers,
            batch_size=BATCH,
            epochs=EPOCHS,
            exchange=Exchange(shard_optimizer=is_sharded, audit=False),
            callbacks=[recorder(folder)],
            model_options=pybackend.ModelOptions(uri=f"{folder}/model.h5"),
            verbose=0,
        )
        paths = [Path(folder, f"{rank}.json") for rank in range(workers)]
        return [json.loads(path.read_text()) for path in paths]


def measure(rounds: int) -> dict[str, dict[str, Figures]]:
    """Medians over interleaved rounds; of the ranks, the largest state and peak."""
    found: dict[tuple[int, int, bool], list[Figures]] = {}
    for number in range(rounds):
        for workers, layers in (*CASES, LARGE) if number == 0 else CASES:
            for is_sharded in (False, True):
                ranks = train(workers, layers, is_sharded)
                figures = {
                    "ms_per_step": ranks[0]["ms"],
                    "state_mb": max(one["state_mb"] for one in ranks),
                    "peak_mb": max(one["peak_mb"] for one in ranks[1:]),
                }
                found.setdefault((workers, layers, is_sharded), []).append(figures)
    middle = {
        case: {name: float(np.median([f[name] for f in all_rounds])) for name in all_rounds[0]}
        for case, all_rounds in found.items()
    }
    tables: dict[str, dict[str, Figures]] = {}
    for (workers, layers, is_sharded), figures in middle.items():
        weights = large.count_parameters(layers)
        title = f"optimizer's state in parts, {weights / 1e6:.0f} million weights, Adam"
        row = f"{workers} workers, {'in parts' if is_sharded else 'whole'}"
        state = 2 * 4 * weights / 1e6
        expected = state / (workers if is_sharded else 1)
        tables.setdefault(title, {})[row] = {
            **figures,
            "state_by_arithmetic_mb": expected,
            "less_than_whole_mb": middle[workers, layers, False]["peak_mb"] - figures["peak_mb"],
            "less_by_arithmetic_mb": state - expected,
        }
    return tables


def measure_peaks() -> dict[str, list[float]]:
    """Return each worker's peak of resident memory in GiB, until it ends, by kind of training."""
    os.environ["TFDIST_FORK_SERVER"] = "0"
    found = {}
    for layers, title in ((0, "a tiny network"), (CASES[0][1], "49 million weights")):
        for is_sharded, is_audited in itertools.product((False, True), (True, False)):
            how = f"{'in parts' if is_sharded else 'whole'}, audit={is_audited}"
            found[f"{title}, {how}"] = _watch_peaks(layers, is_sharded, is_audited)
    return found


def _watch_peaks(layers: int, is_sharded: bool, is_audited: bool) -> list[float]:
    peaks: dict[int, float] = {}
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/status"):
                with suppress(OSError):  # the process has ended
                    if high := re.search(r"VmHWM:\s+(\d+) kB", path.read_text()):
                        peaks[int(path.parent.name)] = int(high[1]) / 2**20

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        rng = np.random.default_rng(0)
        rows = BATCH * STEPS * 2
        result = pybackend.barrier_train(
            "local",
            partial(network, layers),
            (rng.random((rows, large.WIDTH), "float32"), rng.random((rows, 1), "float32")),
            workers=2,
            batch_size=BATCH,
            epochs=EPOCHS,
            exchange=Exchange(shard_optimizer=is_sharded, audit=is_audited),
            verbose=0,
        )
    finally:
        has_ended.set()
        watching.join()
    return [round(peaks[worker.pid], 2) for worker in result.workers]


if __name__ == "__main__":
    measured = measure_peaks() if sys.argv[1:] == ["peaks"] else measure(1)
    print(json.dumps(measured, indent=1))
