"""When the batches of an epoch were there, beside when its steps wanted them."""

from __future__ import annotations

import time
from collections import deque

# More are not read ahead; and of an evaluation nobody takes them.
_MOST = 4096


class Arrivals:
    """When the batches of an epoch were there, noted by whoever reads them, often ahead."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, float]] = deque(maxlen=_MOST)

    def clear(self) -> None:
        """An epoch begins: what was read ahead is not used."""
        self._noted.clear()

    def note(self, steps: int) -> None:
        """The batches of so many more steps are there."""
        self._noted.append((steps, time.perf_counter()))

    def take(self, steps: int) -> list[float]:
        """When each of the next so many batches was there; fewer if that is not known of all."""
        found: list[float] = []
        while len(found) < steps and self._noted:
            there, at = self._noted.popleft()
            taken = min(there, steps - len(found))
            found += [at] * taken
            if there > taken:
                self._noted.appendleft((there - taken, at))
        return found
