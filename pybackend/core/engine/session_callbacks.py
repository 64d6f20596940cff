"""Callbacks on rank 0 that serve the session: for observers, and for TensorBoard's files."""

from __future__ import annotations

import base64
import socket
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.engine.replica import Replica
from pybackend.core.engine.statistics.metrics import to_plain
from pybackend.core.engine.step_changes import override_each
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_tensorboard, is_uri
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Answers, Emit, EventBytes, StepEnded
from pybackend.core.model.view import has_own
from pybackend.core.words import show

# People do not read faster, and a step takes milliseconds.
_REPORT_SECONDS = 0.25


class StepReports(keras.callbacks.Callback):
    """Callback that reports a few steps per second, with the logs that Keras computes anyway."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica
        self._epoch, self._began, self._due = 0, 0.0, 0.0
        self._rows: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._began = epoch, time.perf_counter()
        total = self._replica.batches.total_rows
        self._rows = None if total is None else np.cumsum(total)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if now < self._due:
            return
        self._due = now + _REPORT_SECONDS
        replica, steps = self._replica, self._replica.batches.steps
        # The last of several steps per execution may lie beyond the epoch's end.
        step = min(batch + 1, steps)
        metrics = {name: to_plain(value) for name, value in (logs or {}).items()}
        known = replica.batches.rows * replica.collective.world_size
        rows = int(known if self._rows is None else self._rows[step - 1])
        at = self._epoch + 1, replica.job.epochs, step, steps
        replica.emit(StepEnded(*at, rows, now - self._began, metrics))


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


def make_for_session(replica: Replica, answers: Answers | None) -> tuple[list[Any], list[Any]]:
    """Return the callbacks that report steps to the session, and those that stop on its request."""
    job, is_first = replica.job, replica.rank == 0
    reports = [StepReports(replica)] if is_first and job.reports_steps else []
    observers = [StopWhenAsked(answers)] if is_first and job.is_observed and answers else []
    return reports, observers


# Steps between metrics of single steps, which are those of rank 0's rows.
_STEPS = 50
# Within a long epoch, files are sent to the driver at this interval.
_SECONDS = 10.0
_PART_BYTES = 256 << 10
# Appending to a file of an object store rewrites all of it.
_REMOTE_FLUSH_MILLIS = 120_000


def make_tensorboard(job: TrainingJob, folder: Path, emit: Emit) -> list[Any]:
    """Return the callbacks that write for TensorBoard on rank 0; none if not requested.

    ``folder`` is the worker's own, which is removed when the worker ends. Raises `InputError` if
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

    Values older than ``flush_millis`` are written to the file with the next value.
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
        for number, value in enumerate(values.ravel(), start=1):
            tf.summary.scalar(f"{name}_{number}" if values.ndim else name, value, step=step)

    def create_file_writer(self, folder: str) -> Any:
        return tf.summary.create_file_writer(folder, flush_millis=self._flush_millis)


class _Send(keras.callbacks.Callback):
    """Callback that sends the bytes that were appended to the files."""

    def __init__(self, folder: Path, emit: Emit) -> None:
        super().__init__()
        self._folder, self._emit = folder, emit
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
        for path in sorted(one for one in self._folder.rglob("*") if one.is_file()):
            name = path.relative_to(self._folder).as_posix()
            with path.open("rb") as file:
                start = file.seek(self._sent.get(name, 0))
                while part := file.read(_PART_BYTES):
                    self._emit(EventBytes(name, start, base64.b64encode(part).decode("ascii")))
                    start = self._sent[name] = start + len(part)


class ScaledSteps(keras.callbacks.Callback):
    """Callback that scales the learning rate by the number of workers, but only during each step.

    Callbacks, checkpoints and the trained model see the unscaled learning rate of the optimizer,
    and callbacks can change it. It is one of the last callbacks, and adds the scaled rate in an
    epoch's last step to the history. `ScaleLearningRate` determines the factor.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        assert replica.job.scale_lr is not None
        self._scale, self._workers = replica.job.scale_lr, replica.job.workers
        self._batches, self._most = replica.batches, replica.batches.most_steps
        self._optimizer = replica.model.optimizer
        # Several steps may run between two calls of a callback. A custom train_step may call the
        # optimizer several times; each call has the rate of the first.
        self._advances = int(not has_own(replica.model, "train_step"))
        self._multiples = tf.Variable(np.ones(self._most, "float32"), trainable=False)
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._rate = tf.Variable(0.0, dtype=self._optimizer.learning_rate.dtype, trainable=False)

    @property
    def variables(self) -> list[Any]:
        """Variables that a step reads and changes."""
        return [self._multiples, self._step, self._rate]

    def install(self) -> AbstractContextManager[None]:
        return override_each([self._optimizer], "apply", self._wrap)

    def _wrap(self, optimizer: Any, apply: Any) -> Any:
        def scaled(*args: Any, **options: Any) -> Any:
            given = optimizer.learning_rate
            unscaled = tf.identity(given.value)
            # The last of several steps at once may lie beyond the epoch's end.
            index = tf.minimum(self._step, self._most - 1)
            rate = unscaled * tf.cast(tf.gather(self._multiples, index), unscaled.dtype)
            given.assign(rate)
            applied = apply(*args, **options)
            given.assign(unscaled)
            self._rate.assign(rate)
            self._step.assign_add(self._advances)
            return applied

        return scaled

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        steps = self._batches.steps
        done = [epoch + min(step, steps - 1) / steps for step in range(self._most)]
        multiples = [self._scale.multiple(self._workers, epochs) for epochs in done]
        self._multiples.assign(np.array(multiples, "float32"))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step.assign(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self._rate.numpy())


class ResumedCallbacks(keras.callbacks.CallbackList):
    """Callbacks of a training run that resumes mid-epoch, which takes two calls of ``fit``.

    To the callbacks, this looks like one call, with the step numbers of an uninterrupted epoch.
    """

    def __init__(self, callbacks: list[Any], skip: int, **params: Any) -> None:
        super().__init__(callbacks, **params)
        self._skip = skip
        self._has_begun = False
        self._is_first_fit = skip > 0
        self._last_logs: Any = None

    def begin_rest(self) -> None:
        """Begin the second call, after the epoch that was resumed."""
        self._skip, self._is_first_fit = 0, False

    def on_train_begin(self, logs: Any = None) -> None:
        # A second beginning would reset what callbacks count, such as EarlyStopping its patience.
        if not self._has_begun:
            self._has_begun = True
            super().on_train_begin(logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch + self._skip, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch + self._skip, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._last_logs = logs

    def on_train_end(self, logs: Any = None) -> None:
        # Callbacks end once: after the first call, a `CSVLogger` would close its file for good.
        if not self._is_first_fit:
            super().on_train_end(self._last_logs if logs is None else logs)
