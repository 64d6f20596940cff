"""Workers that leave a training together because some of them were told to end."""

from __future__ import annotations

import numpy as np

from pybackend.collective import Collective
from pybackend.job.notice import Notice


class Leaving:
    """Who was told to end: a rank knows of itself at once, and all know it since the same step.

    Parameters
    ----------
    is_any_step
        Whether they may leave within an epoch.
    """

    def __init__(self, collective: Collective, notice: Notice, is_any_step: bool) -> None:
        self._collective = collective
        self._notice = notice
        self._is_any_step = is_any_step
        self._told: tuple[int, ...] = ()

    @property
    def is_asked(self) -> bool:
        """Whether this rank was told to end, and wants all to leave within the epoch."""
        return self._is_any_step and self._notice()

    def agree(self, stops: bool, is_told: bool) -> bool:
        """Fetch what every rank wants; whether any of them wants the training to stop.

        That goes first: all that is left to do is what ends a training.
        """
        everyone = self._collective.all_gather(np.array([stops, is_told], np.int64))
        is_stop = any(stop for stop, _ in everyone)
        told = (rank for rank, (_, is_told) in enumerate(everyone) if is_told)
        self._told = () if is_stop else tuple(told)
        return is_stop

    def agree_at_end(self, stops: bool) -> bool:
        """As `agree`, at the end of an epoch, after which all may leave in any case."""
        return self.agree(stops, self._notice())

    def find_told(self, is_epoch_end: bool) -> tuple[int, ...]:
        """Ranks because of which all leave now; the same on all of them."""
        if not is_epoch_end and not self._is_any_step:
            return ()
        if self._collective.world_size == 1 and self._notice():
            return (0,)
        return self._told
