"""Bad link between two network namespaces: it loses packets, delays some, and fails now and then.

``python soak_link.py NAMESPACE_A ADDRESS_A NAMESPACE_B ADDRESS_B LOST LATE UP,DOWN ...`` prints
``up``, and carries packets until it is stopped. LOST and LATE are shares of the packets; the link
is up for UP seconds, down for DOWN seconds, and so on, pair after pair, from the first packet on.
Without pairs it stays up.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence

import numpy as np
from wan_link import Direction, carry, open_end

_DELAY_SECONDS, _BYTES_PER_SECOND = 0.0002, 125e6
_LATE_SECONDS = 0.02


class Flaps:
    """Times at which the link is down."""

    def __init__(self, pairs: Sequence[tuple[float, float]]) -> None:
        self._pairs = itertools.cycle(pairs) if pairs else iter(())
        self._up = self._down = 0.0
        self._next()

    def _next(self) -> None:
        up, down = next(self._pairs, (float("inf"), 0.0))
        self._up = max(self._down, time.monotonic()) + up
        self._down = self._up + down

    def is_down(self) -> bool:
        """Return whether the link is down now."""
        now = time.monotonic()
        if now > self._down:
            self._next()
        return self._up < now <= self._down


class Rough(Direction):
    """One direction of the link."""

    def __init__(self, out: int, lost: float, late: float, flaps: Flaps) -> None:
        super().__init__(out, _DELAY_SECONDS, _BYTES_PER_SECOND)
        self._late = Direction(out, _LATE_SECONDS, _BYTES_PER_SECOND)
        self._shares = lost, late
        self._flaps = flaps
        self._draw = np.random.default_rng(out)

    @property
    def next_arrival(self) -> float | None:
        """Return the time at which the next packet arrives."""
        times = (super().next_arrival, self._late.next_arrival)
        return min((when for when in times if when is not None), default=None)

    def send(self, packet: bytes) -> None:
        """Put a packet on the link, unless it is lost."""
        lost, late = self._shares
        drawn = self._draw.random()
        if drawn < lost or self._flaps.is_down():
            return
        if drawn < lost + late:
            self._late.send(packet)
        else:
            super().send(packet)

    def deliver(self) -> None:
        """Deliver the packets that have arrived."""
        super().deliver()
        self._late.deliver()


def main(arguments: list[str]) -> None:
    """Carry packets until this process is stopped."""
    first, first_address, second, second_address, lost, late, *pairs = arguments
    a = open_end(first, first_address, second_address)
    b = open_end(second, second_address, first_address)
    print("up", flush=True)
    flaps = Flaps([(float(up), float(down)) for up, down in (pair.split(",") for pair in pairs)])
    shares = float(lost), float(late)
    carry({a: Rough(b, *shares, flaps), b: Rough(a, *shares, flaps)})


if __name__ == "__main__":
    main(sys.argv[1:])
