"""All-reduces of simulated ranks, event by event, in vectors over the ranks.

A message leaves when its sender has finished the previous round, and takes the latency and time per
byte of the cost model. A rank has finished a round when it has finished the previous one, received
and added. Without jitter, and if all ranks begin at once, this gives the closed formula. With
jitter, each message takes longer or shorter by a random factor, and a late rank delays others, as
far as the algorithm propagates the delay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.core.collective.algorithms import Algorithm, CostModel, count_pairs, find_partners

Array = npt.NDArray[Any]
Factors = Callable[[int], Array | float]
"""Random factors of a number of messages."""


@dataclass(frozen=True)
class Cluster:
    """Ranks that compute separately and then exchange.

    Attributes
    ----------
    ranks
        Number of ranks.
    costs
        Costs of messages between any two ranks.
    jitter
        Standard deviation of the logarithm of a rank's computing time per step.
    message_jitter
        Standard deviation of the logarithm of a message's time.
    slow_share, slow_factor
        Share of ranks that are always slower, and the factor.
    pauses, pause_seconds
        Pauses per step and rank, and their mean duration (exponential).
    """

    ranks: int
    costs: CostModel
    jitter: float = 0.0
    message_jitter: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    pauses: float = 0.0
    pause_seconds: float = 0.0

    def draw_computing(self, seconds: float, steps: int, generator: np.random.Generator) -> Array:
        """Return seconds by step and rank; ``seconds`` is the mean of a rank that is not slow."""
        shape = steps, self.ranks
        drawn = seconds * _factors(self.jitter, shape, generator)
        slow = generator.permutation(self.ranks) < round(self.slow_share * self.ranks)
        drawn = drawn * np.where(slow, self.slow_factor, 1.0)
        stops = generator.random(shape) < self.pauses
        return np.asarray(drawn + stops * generator.exponential(self.pause_seconds, shape))

    def step_seconds(
        self, computing: Array, nbytes: float, algorithm: Algorithm, generator: np.random.Generator
    ) -> float:
        """Return the mean seconds of a step whose exchange of ``nbytes`` follows the computing.

        Parameters
        ----------
        computing
            Seconds by step and rank.
        """
        factors = self._make_factors(generator)
        exchange = ring if algorithm == "ring" else double
        through = np.zeros(self.ranks)
        for own in computing:
            through = exchange(through + own, nbytes, self.costs, factors)
        return float(through.max() / len(computing))

    def _make_factors(self, generator: np.random.Generator) -> Factors:
        if not self.message_jitter:
            return lambda count: 1.0
        # Drawn once: each round takes a slice at a random place.
        pool = _factors(self.message_jitter, (1 << 16,), generator)
        return lambda count: pool[(at := int(generator.integers(len(pool) - count))) : at + count]


def ring(begin: Array, nbytes: float, costs: CostModel, factors: Factors) -> Array:
    """Return the times at which ranks finish a ring all-reduce that they begin at ``begin``."""
    ranks = len(begin)
    part = nbytes / ranks
    message = costs.latency_seconds + part * costs.seconds_per_byte
    add = part * costs.add_seconds_per_byte
    through = begin
    for turn in range(2 * (ranks - 1)):
        sent = np.maximum(through, np.roll(through, 1))
        through = sent + message * factors(ranks) + (add if turn < ranks - 1 else 0.0)
    return through


def double(begin: Array, nbytes: float, costs: CostModel, factors: Factors) -> Array:
    """Return the times at which ranks finish recursive doubling that they begin at ``begin``."""
    ranks = len(begin)
    message = costs.latency_seconds + nbytes * costs.seconds_per_byte
    add = nbytes * costs.add_seconds_per_byte
    through = np.array(begin, np.float64)
    pairs = count_pairs(ranks)
    folded, kept = np.arange(1, 2 * pairs, 2), np.arange(0, 2 * pairs, 2)
    sent = np.maximum(through[kept], through[folded])
    through[kept] = sent + message * factors(pairs) + add
    active, rounds = _partners(ranks)
    for partners in rounds:
        sent = np.maximum(through[active], through[partners])
        through[active] = sent + message * factors(len(active)) + add
    through[folded] = through[kept] = through[kept] + message * factors(pairs)
    return through


@cache
def _partners(ranks: int) -> tuple[Array, list[Array]]:
    """Return the ranks that take part in all rounds, and their partners in each round."""
    found = {rank: partners for rank in range(ranks) if (partners := find_partners(rank, ranks))}
    return np.array(list(found)), [np.array(turn) for turn in zip(*found.values(), strict=True)]


def _factors(spread: float, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Draw log-normal factors with mean 1."""
    return np.exp(generator.normal(-(spread**2) / 2, spread, shape))
