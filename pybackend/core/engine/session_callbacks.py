"""Callbacks on rank 0 that serve the session: for observers, and for TensorBoard's files."""

from __future__ import annotations

import base64
import socket
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.engine.metrics import to_plain
from pybackend.core.engine.replica import Replica
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_tensorboard, is_uri
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Answers, Emit, EventBytes, StepEnded
from pybackend.core.words import show

# People do not read faster, and a step takes milliseconds.
_REPORT_SECONDS = 0.25


class StepReports(keras.callbacks.Callback):
    """Callback that reports a few steps per second, with the logs that Keras computes anyway."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._job = replica.job
        self._feed = replica.feed
        self._world_size = replica.collective.world_size
        self._emit = replica.emit
        self._epoch = 0
        self._began = 0.0
        self._due = 0.0
        self._rows: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._began = epoch, time.perf_counter()
        total = self._feed.total_rows
        self._rows = None if total is None else np.cumsum(total)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if now < self._due:
            return
        self._due = now + _REPORT_SECONDS
        # The last of several steps per execution may lie beyond the epoch's end.
        step = min(batch + 1, self._feed.steps)
        metrics = {name: to_plain(value) for name, value in (logs or {}).items()}
        epochs, seconds = self._job.epochs, now - self._began
        self._emit(
            StepEnded(
                self._epoch + 1,
                epochs,
                step,
                self._feed.steps,
                self._count_rows(step),
                seconds,
                metrics,
            )
        )

    def _count_rows(self, step: int) -> int:
        if self._rows is None:
            return int(self._feed.rows * self._world_size)
        return int(self._rows[step - 1])


class StopWhenAsked(keras.callbacks.Callback):
    """Callback that stops the training on an observer's request, after an epoch or during one.

    It runs after the custom callbacks and before the callback that makes all ranks stop together.
    """

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._answers.forget_epochs()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._answers.is_stop:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._answers.wait_for_epoch(epoch + 1):
            self.model.stop_training = True


# Steps between metrics of single steps, which are those of rank 0's rows.
_STEPS = 50
# Within a long epoch, files are sent to the driver at this interval.
_SECONDS = 10.0
_PART_BYTES = 256 << 10
# Appending to a file of an object store rewrites all of it.
_REMOTE_FLUSH_MILLIS = 120_000


def make_tensorboard(job: TrainingJob, folder: Path, emit: Emit) -> list[Any]:
    """Return the callbacks that write for TensorBoard on rank 0; none if not requested.

    Parameters
    ----------
    folder
        The worker's own folder, which is removed when the worker ends.

    Raises
    ------
    InputError
        TensorBoard is not installed, or TensorFlow cannot write to the URI.
    """
    if job.tensorboard is None:
        return []
    check_tensorboard(f" on {socket.gethostname()}")
    if is_uri(job.tensorboard):
        _check_writable(job.tensorboard)
        return [_TensorBoard(job.tensorboard, _REMOTE_FLUSH_MILLIS)]
    own = folder / "tensorboard"
    return [_TensorBoard(str(own), 0), _Send(own, emit)]


def _check_writable(uri: str) -> None:
    try:
        tf.io.gfile.makedirs(uri)
    except tf.errors.OpError as error:
        raise InputError(
            f"`track_tensorboard`: TensorFlow cannot write to {show(uri)} ({error.message}): "
            "specify a folder without a scheme, which the driver writes to"
        ) from error


class _TensorBoard(keras.callbacks.TensorBoard):
    """Keras's callback, which also writes every epoch's metrics when it writes those of steps.

    Parameters
    ----------
    flush_millis
        Values older than this are written to the file with the next value.
    """

    def __init__(self, folder: str, flush_millis: int) -> None:
        super().__init__(folder, update_freq=_STEPS)
        self._flush_millis = flush_millis

    @property
    def summary(self) -> Any:
        """Module that Keras uses to write summaries."""
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
        """Write a metric; a metric of several values gets a curve for each, numbered from 1."""
        values = np.asarray(data)
        if values.ndim == 0:
            tf.summary.scalar(name, data, step=step)
        for number, value in enumerate(values.ravel() if values.ndim else (), start=1):
            tf.summary.scalar(f"{name}_{number}", value, step=step)

    def create_file_writer(self, folder: str) -> Any:
        """Create a writer that flushes at the given interval."""
        return tf.summary.create_file_writer(folder, flush_millis=self._flush_millis)


class _Send(keras.callbacks.Callback):
    """Callback that sends the bytes that were appended to the files."""

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
