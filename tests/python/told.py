"""A training that receives a termination signal while it runs, and then resumes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from conftest import wait_for
from threads import Threads

import pybackend

RNG = np.random.default_rng(0)
X = RNG.normal(size=(160, 6)).astype("float32")
Y = RNG.integers(0, 3, 160)
PATIENCE = 120.0


class UntilTold(keras.callbacks.Callback):
    """Make rank 0 wait for the termination signal, once, at the third step."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = str(mark)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if os.environ["TFDIST_WORKER"] != "0" or batch != 2 or Path(self.mark).exists():
            return
        import signal
        import threading
        import time

        told: list[int] = []
        handler = signal.getsignal(signal.SIGTERM)

        def take(number: int, frame: Any) -> None:
            handler(number, frame)
            told.append(number)

        signal.signal(signal.SIGTERM, take)
        Path(self.mark).touch()
        deadline, pause = time.monotonic() + PATIENCE, threading.Event()
        while not told and time.monotonic() < deadline:
            pause.wait(0.05)


def build() -> Any:
    layers = [keras.Input((6,)), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    return model


def train(target: Any, folder: Path, **settings: Any) -> pybackend.types.TrainResult:
    listed = [UntilTold(folder / "mark")]
    defaults = {"workers": 2, "epochs": 2, "batch_size": 10, "seed": 5}
    return pybackend.barrier_train(target, build, (X, Y), callbacks=listed, **defaults | settings)


def check_goes_on(target: Any, folder: Path, tell: Callable[[], Any], shown: Any) -> str:
    """Preempt a training and restart it; return its output about that.

    Parameters
    ----------
    folder
        Shared by this machine and the workers' machines.
    tell
        Sends the termination signal to the workers.
    shown
        The fixture ``capsys``.
    """
    kept = pybackend.Recovery(str(folder / "kept"), restarts=1)
    with Threads() as thread:
        training = thread.submit(train, target, folder, recovery=kept)
        wait_for(lambda: (folder / "mark").exists() or training.done(), PATIENCE)
        tell()
        found = training.result()
    expected = train(None, folder, verbose=0)
    assert found.history == expected.history
    assert found.workers[0].weights_sha256 == expected.workers[0].weights_sha256
    said = str(shown.readouterr().out)
    assert "all workers left the training after epoch 1, step 4; a checkpoint was written" in said
    assert "training resumes from the checkpoint of epoch 1, step 4" in said
    return said
