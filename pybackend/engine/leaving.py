"""Joint end of a training after some workers were preempted."""

from __future__ import annotations

import numpy as np

from pybackend.collective import Collective
from pybackend.job.notice import Notice


class Leaving:
    """Preempted ranks: each knows its own preemption at once, and all know it at the same step.

    Parameters
    ----------
    is_any_step
        True if they may leave within an epoch.
    """

    def __init__(self, collective: Collective, notice: Notice, is_any_step: bool) -> None:
        self._collective = collective
        self._notice = notice
        self._is_any_step = is_any_step
        self._told: tuple[int, ...] = ()

    @property
    def is_asked(self) -> bool:
        """True if this rank was preempted and requests that all leave within the epoch."""
        return self._is_any_step and self._notice()

    def agree(self, stops: bool, is_told: bool) -> bool:
        """Exchange the requests of all ranks; return whether any requests that the training stops.

        A stop takes precedence over a preemption: the training then ends normally.
        """
        everyone = self._collective.all_gather(np.array([stops, is_told], np.int64))
        is_stop = any(stop for stop, _ in everyone)
        preempted = (rank for rank, (_, is_told) in enumerate(everyone) if is_told)
        self._told = () if is_stop else tuple(preempted)
        return is_stop

    def agree_at_end(self, stops: bool) -> bool:
        """Call `agree` at the end of an epoch, after which all may leave in any case."""
        return self.agree(stops, self._notice())

    def find_told(self, is_epoch_end: bool) -> tuple[int, ...]:
        """Return the preempted ranks because of which all leave now; the same on all ranks."""
        if not is_epoch_end and not self._is_any_step:
            return ()
        if self._collective.world_size == 1 and self._notice():
            return (0,)
        return self._told
