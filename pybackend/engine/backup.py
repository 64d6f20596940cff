"""Keras's BackupAndRestore over several workers: rank 0 keeps the backup, all resume from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from pybackend.collective import Collective, all_sum
from pybackend.engine.state import broadcast_state


def find_epoch_to_resume(callbacks: Sequence[Any], collective: Collective) -> int:
    """First epoch that is still to be trained, by the backup on rank 0's machine; 0 without one."""
    epoch = 0
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore) and collective.rank == 0:
            epoch = _read_saved_epoch(str(callback.backup_dir))
    return int(all_sum(collective, [epoch])[0])


class ShareRestoredState(keras.callbacks.Callback):
    """Right after BackupAndRestore: gives all ranks what rank 0 has restored."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self._collective = collective

    def on_train_begin(self, logs: Any = None) -> None:
        broadcast_state(self.model, self._collective)


def _read_saved_epoch(folder: str) -> int:
    """What the callback itself reads: 0 if there is no backup yet."""
    path = f"{folder}/training_metadata.json"
    if not tf.io.gfile.exists(path):
        return 0
    with tf.io.gfile.GFile(path) as file:
        return int(json.loads(file.read())["epoch"])
