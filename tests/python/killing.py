"""A callback that kills a process during a training, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import keras


class KillAt(keras.callbacks.Callback):
    """Kill a worker, or another process, at the end of a step of that worker.

    Parameters
    ----------
    number
        The signal.
    mark
        A file that is created before the kill, and prevents a second kill. If a file with this
        name and ``.victim`` exists, it has the id of the process to kill, "parent", or a word
        of the command line of the worker's ancestor to kill.
    """

    def __init__(
        self, rank: int, epoch: int, step: int, mark: str | Path, number: int = signal.SIGKILL
    ) -> None:
        super().__init__()
        self.moment, self.mark, self.number = (rank, epoch, step), str(mark), int(number)
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = (int(os.environ["TFDIST_WORKER"]), self.epoch, batch)
        if now == self.moment and not Path(self.mark).exists():
            Path(self.mark).touch()
            victim = Path(f"{self.mark}.victim")
            os.kill(_find(victim.read_text()) if victim.exists() else os.getpid(), self.number)


def _find(victim: str) -> int:
    number = os.getpid()
    if victim.isdecimal():
        return int(victim)
    if victim == "parent":
        return os.getppid()
    while victim.encode() not in Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0"):
        number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
    return number
