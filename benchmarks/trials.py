"""Seconds of many trials at once, compared with one after the other; each result must be the same.

A trial takes ten seconds, most of which it waits in a callback, because this machine may have fewer
cores than trials that run at once. So the waiting takes the place of computing on other cores; the
starts, the rows and the exchange of results are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

import pybackend

Table = dict[str, dict[str, float]]
EPOCHS = 4
# Trials, slots, and seconds of waiting in each trial.
LONG, SHORT = (20, 8, 9.0), (6, 3, 1.5)


def measure(rounds: int) -> dict[str, Table]:
    """Measure once; with fewer than three rounds, fewer and shorter trials.

    It runs in a separate process, whose workers are forked from one that has imported TensorFlow.
    """
    case = LONG if rounds > 2 else SHORT
    command = [sys.executable, __file__, json.dumps(case)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TFDIST_FORK_SERVER": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    trials, slots, waiting = case
    title = f"{trials} trials, {slots} at once, of which each waits {waiting:g} s, this machine"
    table: Table = json.loads(done.stdout.splitlines()[-1])
    return {title: table}


def build(units: int) -> Any:
    """Return a small network."""
    import keras

    layers = [keras.Input((64,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss)
    return model


def _measure(trials: int, slots: int, waiting: float) -> Table:
    import keras

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20_000, 64)).astype("float32"), rng.integers(0, 10, 20_000)
    waits = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: time.sleep(waiting / EPOCHS)
    )
    common: dict[str, Any] = {
        "epochs": EPOCHS,
        "batch_size": 256,
        "seed": 1,
        "callbacks": [waits],
        "verbose": 0,
    }
    units = [16 + 4 * trial for trial in range(trials)]
    began = time.monotonic()
    found = pybackend.train_many(
        "local", build, rows, grid={"units": units}, parallelism=slots, **common
    )
    at_once = time.monotonic() - began
    began = time.monotonic()
    alone = [
        pybackend.barrier_train("local", lambda n=n: build(n), rows, workers=1, **common)
        for n in units
    ]
    in_turn = time.monotonic() - began
    for trial, result in zip(found.trials, alone, strict=True):
        assert trial.result is not None, trial.error
        assert trial.result.history == result.history
        assert trial.result.workers[0].weights_sha256 == result.workers[0].weights_sha256
    return {"barrier_train in a loop": {"seconds": in_turn}, "train_many": {"seconds": at_once}}


if __name__ == "__main__":
    print(json.dumps(_measure(*json.loads(sys.argv[1]))))
