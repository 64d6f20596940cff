"""Times at which the batches of an epoch were ready, compared with when its steps needed them."""

from __future__ import annotations

import time
from collections import deque

# More are not read ahead; the times of an evaluation are never taken.
_MOST = 4096


class Arrivals:
    """Times at which the batches of an epoch were ready, noted by their reader, often ahead."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, float]] = deque(maxlen=_MOST)

    def clear(self) -> None:
        """Begin an epoch: batches that were read ahead are not used."""
        self._noted.clear()

    def note(self, steps: int) -> None:
        """Note that the batches of more steps are ready."""
        self._noted.append((steps, time.perf_counter()))

    def take(self, steps: int) -> list[float]:
        """Return when each of the next batches was ready; fewer if the time of some is unknown."""
        found: list[float] = []
        while len(found) < steps and self._noted:
            there, at = self._noted.popleft()
            taken = min(there, steps - len(found))
            found += [at] * taken
            if there > taken:
                self._noted.appendleft((there - taken, at))
        return found
