"""A training with a process killed: started by recovery.py, and imported by its workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import keras
import numpy as np

import pybackend

WORKERS, EPOCHS, STEPS, BATCH = 2, 4, 12, 32
FEATURES, WIDTH, CLASSES = 32, 512, 3
# Parts of command lines by which a worker finds its parent processes.
_ANCESTORS = {
    "executor": "org.apache.spark.executor.CoarseGrainedExecutorBackend",
    "spark worker": "org.apache.spark.deploy.worker.Worker",
}


@dataclass(frozen=True)
class Schedule:
    """Process to kill, and time of the kill.

    Attributes
    ----------
    victim
        ``"worker"``, the process that started it (``"task"``), its ``"executor"``, the
        ``"spark worker"`` that started the executor, the ``"driver"``, or its whole ``"group"``,
        including Spark's Java.
    rank
        Worker that orders the kill.
    step
        Number of steps of the training before the kill; -1: while the model is built.
    delay
        Seconds after the step, during which the training continues.
    every
        Interval of checkpoints.
    """

    victim: str
    rank: int
    step: int
    delay: float
    every: int | str


def strike(folder: str, step: int) -> None:
    """Order the kill of the schedule in a folder if this is its moment, once.

    Another process executes it: the kill may hit this process at any line, and after its end.
    """
    file, mark = Path(folder, "schedule.json"), Path(folder, "mark")
    if mark.exists() or not file.exists():
        return
    schedule = Schedule(**json.loads(file.read_text()))
    if (int(os.environ["TFDIST_RANK"]), step) == (schedule.rank, schedule.step):
        mark.touch()
        order = f"sleep {schedule.delay}; kill -9 {_find(schedule.victim, folder)}"
        subprocess.Popen(["sh", "-c", order], start_new_session=True)


def _find(victim: str, folder: str) -> int:
    """Return the number for `kill`, which is negative for a group."""
    if victim in ("driver", "group"):
        number = int(Path(folder, "driver").read_text())
        return number if victim == "driver" else -number
    if victim == "task":
        return os.getppid()
    number = os.getpid()
    while word := _ANCESTORS.get(victim):
        if word.encode() in Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0"):
            break
        number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
    return number


class Strike(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that executes the schedule in a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        strike(self.folder, self.epoch * STEPS + batch)


def build(folder: str = "") -> Any:
    """Return a model with state of every kind: dropout, moving averages, momenta."""
    if "TFDIST_RANK" in os.environ:
        strike(folder, -1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(WIDTH, activation="relu"),
            layers.Dense(WIDTH, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.002), loss, metrics=["accuracy"])
    return model


def rows() -> tuple[Any, Any]:
    """Return rows for `STEPS` steps of all workers."""
    generator = np.random.default_rng(0)
    count = WORKERS * STEPS * BATCH
    features = generator.normal(size=(count, FEATURES)).astype("float32")
    return features, generator.integers(0, CLASSES, count)


def make_callbacks(folder: str) -> list[Any]:
    """Return callbacks with state, and the one that kills."""
    return [
        keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.05),
        Strike(folder),
    ]


def train(
    target: Any, data: Any, folder: str, every: Any = None, resume: bool = False, **settings: Any
) -> Any:
    """Train, with checkpoints in the folder if ``every`` is given, and describe the result."""
    kept = pybackend.Recovery(f"{folder}/kept", every=every, resume=resume) if every else None
    result = pybackend.barrier_train(
        target,
        lambda: build(folder),
        data,
        workers=WORKERS,
        epochs=EPOCHS,
        batch_size=BATCH,
        seed=5,
        callbacks=make_callbacks(folder),
        recovery=kept,
        **settings,
    )
    return describe(result.model, result.history)


def describe(model: Any, history: Any) -> Any:
    """Describe what must be equal bit for bit: weights, momenta and history."""
    variables = [*model.weights, *model.optimizer.variables]
    digest = sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in variables)).hexdigest()
    return {"sha256": digest, "history": {k: list(map(float, v)) for k, v in history.items()}}


def write(folder: str, found: Any) -> None:
    """Write the result, or an error's text, to a folder; called by R."""
    Path(folder, "found.json").write_text(json.dumps(found))


def main(folder: str, rows_folder: str, master: str, driver: str, every: int | str) -> None:
    """Run a driver, the leader of its process group, which one of its workers kills."""
    Path(folder, "driver").write_text(str(os.getpid()))
    if not master:
        train("local", rows(), folder, every, verbose=0)
        return
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
    from standalone import Cluster

    cluster = Cluster(master, driver, (), Path(folder))
    with cluster.session(spark__cores__max=str(WORKERS)) as session:
        train(session, session.read.parquet(rows_folder), folder, every, verbose=0)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
