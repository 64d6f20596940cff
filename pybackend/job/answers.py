"""What a worker is told by those who observe its training from the session that started it."""

from __future__ import annotations

import threading

from pybackend.job.messages import Answer, StopTraining


class Answers:
    """The answers to a worker's events, as they come; taken in by one thread, used by another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_stop = False
        self._epoch = 0

    @property
    def is_stop(self) -> bool:
        """Return whether the training is to stop."""
        return self._is_stop

    def take(self, answer: Answer) -> None:
        """Take in an answer."""
        with self._changed:
            if isinstance(answer, StopTraining):
                self._is_stop = True
            else:
                self._epoch = answer.epoch
            self._changed.notify_all()

    def forget_epochs(self) -> None:
        """No epoch has been answered: an elastic training repeats one, from 1 or any other."""
        with self._changed:
            self._epoch = 0

    def wait_for_epoch(self, epoch: int) -> bool:
        """Wait for the answer to an epoch's end; whether the training is to stop.

        There is no limit: an observer may draw, or ask its user. A session that is gone ends this
        process.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_stop or self._epoch >= epoch)
        return self._is_stop
