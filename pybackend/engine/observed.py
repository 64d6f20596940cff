"""Callbacks of rank 0 that report the training's steps to the driver, and stop the training."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from pybackend.engine.metrics import to_plain
from pybackend.engine.replica import Replica
from pybackend.job.answers import Answers
from pybackend.job.messages import StepEnded

# People do not read faster, and a step takes milliseconds.
_REPORT_SECONDS = 0.25


class StepReports(keras.callbacks.Callback):
    """Callback that reports a few steps a second, with the logs that Keras computes anyway."""

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
    """Callback that stops the training on an observer's request, after an epoch or within one.

    It runs after the custom callbacks, and before the one that makes all ranks stop together.
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
