"""What a collective call costs, predicted from three measured figures.

The model of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH" (2005): a message of n bytes takes alpha + n beta, and adding n bytes takes n gamma.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pybackend.collective.doubling import folded
from pybackend.collective.links import Array

Algorithm = Literal["ring", "doubling"]

_MESSAGE = 1 << 20
_TINY_ROUNDS = 12
_LARGE_ROUNDS = 3


@dataclass(frozen=True)
class CostModel:
    """Seconds of an all-reduce, by algorithm, bytes and ranks.

    Parameters
    ----------
    latency_seconds
        alpha: of an exchange of tiny messages between two ranks.
    seconds_per_byte
        beta: of an exchange between two ranks, sending as much as receiving.
    add_seconds_per_byte
        gamma: of adding one buffer to another.
    """

    latency_seconds: float
    seconds_per_byte: float
    add_seconds_per_byte: float

    def ring(self, nbytes: float, world_size: int) -> float:
        """Reduce-scatter and all-gather: many rounds, each with 1 / N of the buffer."""
        others = world_size - 1
        moved = 2 * self.seconds_per_byte + self.add_seconds_per_byte
        return 2 * others * self.latency_seconds + others / world_size * nbytes * moved

    def doubling(self, nbytes: float, world_size: int) -> float:
        """Recursive doubling: few rounds, each with the whole buffer."""
        message = self.latency_seconds + nbytes * self.seconds_per_byte
        add = nbytes * self.add_seconds_per_byte
        rounds = world_size.bit_length() - 1
        fold = 2 * message + add if folded(world_size) else 0.0
        return rounds * (message + add) + fold

    def best(self, nbytes: float, world_size: int, ring_bytes: float | None = None) -> Algorithm:
        """The algorithm that is predicted to be faster.

        ``ring_bytes`` is what would go round the ring, where that is not all of ``nbytes``.
        """
        ring = self.ring(nbytes if ring_bytes is None else ring_bytes, world_size)
        return "doubling" if self.doubling(nbytes, world_size) <= ring else "ring"


def measure(doubling: Callable[[Array], None], world_size: int) -> CostModel:
    """Measure the three figures and agree on their means: all ranks call it together.

    Parameters
    ----------
    doubling
        All-reduce by recursive doubling.
    world_size
        The number of ranks, 2 at least.
    """
    rounds = world_size.bit_length() - 1 + (2 if folded(world_size) else 0)
    tiny, large = np.zeros(1), np.zeros(_MESSAGE // 4, np.float32)
    other = np.zeros_like(large)
    latency = _fastest(lambda: doubling(tiny), _TINY_ROUNDS) / rounds
    add = _fastest(lambda: np.add(large, other, out=large), _LARGE_ROUNDS) / _MESSAGE
    message = _fastest(lambda: doubling(large), _LARGE_ROUNDS) / rounds
    # At least a terabyte per second, whatever the clock says.
    per_byte = max((message - latency) / _MESSAGE - add, 1e-12)
    figures = np.array([latency, per_byte, add])
    # All ranks must choose alike, so all use the same figures.
    doubling(figures)
    return CostModel(*(figures / world_size).tolist())


def _fastest(work: Callable[[], object], rounds: int) -> float:
    """Seconds, the least of some runs: what disturbs a run only adds to it."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
