"""Cost of a collective call, predicted from three measured values.

The model of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH" (2005): a message of n bytes takes alpha + n beta, and adding n bytes takes n gamma.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pybackend.collective.buffers import Array
from pybackend.collective.doubling import count_pairs

Algorithm = Literal["ring", "doubling"]

_MESSAGE = 1 << 20
_TINY_ROUNDS = 12
_LARGE_ROUNDS = 3


@dataclass(frozen=True)
class CostModel:
    """Prediction of the seconds of an all-reduce from algorithm, bytes and ranks.

    Parameters
    ----------
    latency_seconds
        alpha: for an exchange of tiny messages between two ranks.
    seconds_per_byte
        beta: for an exchange between two ranks that sends as much as it receives.
    add_seconds_per_byte
        gamma: for adding one buffer to another.
    """

    latency_seconds: float
    seconds_per_byte: float
    add_seconds_per_byte: float

    def predict_ring(self, nbytes: float, world_size: int) -> float:
        """Predict reduce-scatter and all-gather: many rounds, each with 1 / N of the buffer."""
        others = world_size - 1
        moved = 2 * self.seconds_per_byte + self.add_seconds_per_byte
        return 2 * others * self.latency_seconds + others / world_size * nbytes * moved

    def predict_doubling(self, nbytes: float, world_size: int) -> float:
        """Predict recursive doubling: few rounds, each with the whole buffer."""
        message = self.latency_seconds + nbytes * self.seconds_per_byte
        add = nbytes * self.add_seconds_per_byte
        rounds = world_size.bit_length() - 1
        fold = 2 * message + add if count_pairs(world_size) else 0.0
        return rounds * (message + add) + fold

    def choose(self, nbytes: float, world_size: int, ring_bytes: float | None = None) -> Algorithm:
        """Choose the algorithm that is predicted to be faster.

        ``ring_bytes`` are the bytes that a ring would send, if they differ from ``nbytes``.
        """
        ring = self.predict_ring(nbytes if ring_bytes is None else ring_bytes, world_size)
        return "doubling" if self.predict_doubling(nbytes, world_size) <= ring else "ring"


def measure(doubling: Callable[[Array], None], world_size: int) -> CostModel:
    """Measure the three values and agree on their means; all ranks call it together.

    Parameters
    ----------
    doubling
        All-reduce by recursive doubling.
    world_size
        The number of ranks, at least 2.
    """
    rounds = world_size.bit_length() - 1 + (2 if count_pairs(world_size) else 0)
    tiny, large = np.zeros(1), np.zeros(_MESSAGE // 4, np.float32)
    other = np.zeros_like(large)
    latency = _time_fastest(lambda: doubling(tiny), _TINY_ROUNDS) / rounds
    add = _time_fastest(lambda: np.add(large, other, out=large), _LARGE_ROUNDS) / _MESSAGE
    message = _time_fastest(lambda: doubling(large), _LARGE_ROUNDS) / rounds
    # At most a terabyte per second, even if the clock measures more.
    per_byte = max((message - latency) / _MESSAGE - add, 1e-12)
    values = np.array([latency, per_byte, add])
    # All ranks must choose the same algorithm, so all use the same values.
    doubling(values)
    return CostModel(*(values / world_size).tolist())


def _time_fastest(work: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the fastest of some runs: disturbances only make a run slower."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
