"""Answers of the observers in the session to a worker's events."""

from __future__ import annotations

import threading

from pybackend.job.messages import Answer, StopTraining


class Answers:
    """Answers to a worker's events, received by one thread and used by another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_stop = False
        self._epoch = 0

    @property
    def is_stop(self) -> bool:
        """Return whether the training stops."""
        return self._is_stop

    def take(self, answer: Answer) -> None:
        """Store an answer."""
        with self._changed:
            if isinstance(answer, StopTraining):
                self._is_stop = True
            else:
                self._epoch = answer.epoch
            self._changed.notify_all()

    def forget_epochs(self) -> None:
        """Forget the answered epochs, because an elastic training repeats some."""
        with self._changed:
            self._epoch = 0

    def wait_for_epoch(self, epoch: int) -> bool:
        """Wait for the answer to an epoch's end; return whether the training stops.

        There is no time limit: an observer may draw a plot, or ask its user. If the session ends,
        this process ends, too.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_stop or self._epoch >= epoch)
        return self._is_stop
