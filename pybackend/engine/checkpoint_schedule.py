"""When a checkpoint is due: all workers say so at the same step."""

from __future__ import annotations

import time

import numpy as np

from pybackend.collective import Collective
from pybackend.job.checkpoint import Checkpoint


class Schedule:
    """Counts steps, or the seconds of rank 0's clock.

    The clock is looked at together, at steps that lie as far apart as the time that is left allows:
    to agree at every step would cost a message each.
    """

    def __init__(self, checkpoint: Checkpoint, collective: Collective) -> None:
        self._every_epoch = checkpoint.every == "epoch"
        self._steps = checkpoint.steps
        self._seconds = checkpoint.seconds
        self._collective = collective
        self.restart()

    def restart(self) -> None:
        """A checkpoint was made just now."""
        self._done = 0
        self._next_look = 1
        self._began = time.monotonic()

    def advance(self, steps: int) -> bool:
        """Count steps; whether a checkpoint is due after them. Ranks call it together."""
        self._done += steps
        if self._steps is not None:
            return self._done >= self._steps
        if self._seconds is None or self._done < self._next_look:
            return False
        passed = np.array([time.monotonic() - self._began])
        self._collective.broadcast(passed)
        left = self._seconds - float(passed[0])
        if left > 0:
            pace = max(float(passed[0]), 1e-9) / self._done
            # The first steps are slow: never more than as many again.
            self._next_look = self._done + max(1, min(int(left / pace), self._done))
        return left <= 0

    @property
    def is_each_epoch(self) -> bool:
        """Whether the end of each epoch is kept."""
        return self._every_epoch
