"""TensorBoard's event files of a training: Keras writes them on rank 0, which sends them on."""

from __future__ import annotations

import base64
import socket
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.errors import InputError
from pybackend.job.job import TrainingJob
from pybackend.job.messages import Emit, EventBytes
from pybackend.job.tensorboard import check_installed, is_uri

# Steps between metrics of single steps, which are those of rank 0's rows.
_STEPS = 50
# Within a long epoch, files are sent to the driver at this interval.
_SECONDS = 10.0
_PART_BYTES = 256 << 10
# Appending to a file of an object store rewrites all of it.
_REMOTE_FLUSH_MILLIS = 120_000


def make_board(job: TrainingJob, folder: Path, emit: Emit) -> list[Any]:
    """Return the callbacks of rank 0 that write for TensorBoard; none if it is not requested.

    Parameters
    ----------
    folder
        The worker's own folder, which is removed when it ends.

    Raises
    ------
    InputError
        TensorBoard is not installed, or TensorFlow cannot write to the URI.
    """
    if job.tensorboard is None:
        return []
    check_installed(f" on {socket.gethostname()}")
    if is_uri(job.tensorboard):
        _check_writable(job.tensorboard)
        return [_Board(job.tensorboard, _REMOTE_FLUSH_MILLIS)]
    own = folder / "tensorboard"
    return [_Board(str(own), 0), _Send(own, emit)]


def _check_writable(uri: str) -> None:
    try:
        tf.io.gfile.makedirs(uri)
    except tf.errors.OpError as error:
        raise InputError(
            f"`tensorboard`: TensorFlow cannot write to {uri!r} ({error.message}): name a folder "
            "without a scheme; the driver writes to it"
        ) from error


class _Board(keras.callbacks.TensorBoard):
    """Keras's callback, which also writes every epoch's metrics if it writes those of some steps.

    Parameters
    ----------
    flush_millis
        Values that are older are written to the file with the next value.
    """

    def __init__(self, folder: str, flush_millis: int) -> None:
        super().__init__(folder, update_freq=_STEPS)
        self._flush_millis = flush_millis

    @property
    def summary(self) -> Any:
        """Module with which Keras writes."""
        return _Summary(self._flush_millis)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Else the epoch's metrics are written only if its last step is one of those.
        with tf.summary.record_if(True):
            super().on_epoch_end(epoch, logs)


class _Summary:
    """TensorFlow's module for summaries, whose writers flush at a given interval."""

    def __init__(self, flush_millis: int) -> None:
        self._flush_millis = flush_millis

    def __getattr__(self, name: str) -> Any:
        return getattr(tf.summary, name)

    def scalar(self, name: str, data: Any, step: Any = None) -> None:
        """Write a metric; one of several values has a curve for each, counted from 1."""
        values = np.asarray(data)
        if values.ndim == 0:
            tf.summary.scalar(name, data, step=step)
        for number, value in enumerate(values.ravel() if values.ndim else (), start=1):
            tf.summary.scalar(f"{name}_{number}", value, step=step)

    def create_file_writer(self, folder: str) -> Any:
        """Create a writer that flushes at the given interval."""
        return tf.summary.create_file_writer(folder, flush_millis=self._flush_millis)


class _Send(keras.callbacks.Callback):
    """Callback that sends what was added to the files."""

    def __init__(self, folder: Path, emit: Emit) -> None:
        super().__init__()
        self._folder = folder
        self._emit = emit
        self._sent: dict[str, int] = {}
        self._last = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.monotonic() - self._last > _SECONDS:
            self._send()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._send()

    def on_train_end(self, logs: Any = None) -> None:
        self._send()  # all writers are closed by now
        self._emit(EventBytes("", 0, "", is_last=True))

    def _send(self) -> None:
        self._last = time.monotonic()
        for path in sorted(self._folder.rglob("*")):
            if path.is_file():
                self._send_file(path)

    def _send_file(self, path: Path) -> None:
        name = path.relative_to(self._folder).as_posix()
        with path.open("rb") as file:
            file.seek(self._sent.get(name, 0))
            while part := file.read(_PART_BYTES):
                start = self._sent.get(name, 0)
                self._emit(EventBytes(name, start, base64.b64encode(part).decode("ascii")))
                self._sent[name] = start + len(part)
