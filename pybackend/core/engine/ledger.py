"""Ledger of the rows that workers read to train on: each once per epoch, in its own step.

A worker adds up hashes of the numbers of its rows, step by step, while it reads them. At the end of
an epoch the sums of all workers must be those of the order that `replay_batches` lists, which is
computed in another way: from the whole order, cut into steps. An error of any kind, such as a row
that is read twice or in another step, changes a sum of 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pybackend.core.collective import Collective
from pybackend.core.data.sharding import Index

Sums = npt.NDArray[np.uint64]
# Multipliers of rows and steps, and the finalizer of SplitMix64 (Steele et al., 2014).
_ROWS, _STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_MIXES = [
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
]


class Ledger:
    """Sums of one worker in one epoch.

    Parameters
    ----------
    steps
        Number of steps of the epoch.
    """

    def __init__(self, steps: int) -> None:
        self.sums = np.zeros(steps, np.uint64)

    def note(self, step: int, rows: Index, edges: Index) -> None:
        """Note that rows were read for some steps, the first of which is ``step``.

        Parameters
        ----------
        rows
            Numbers of the rows in the epoch's order.
        edges
            First row of each step among these, and the end of the last one.
        """
        self.sums[step : step + len(edges) - 1] += _add_up(step, rows, edges)

    def subtract(self, expected: Iterable[tuple[int, Index, Index]]) -> Sums:
        """Return how the sums of all steps differ from those of other rows, as `note` takes them.

        Over the workers, the differences of a step add up to 0, modulo 2^64, if these are all of
        its rows.
        """
        right = Ledger(len(self.sums))
        for one in expected:
            right.note(*one)
        return self.sums - right.sums


def find_wrong(differences: Sums, collective: Collective) -> list[int]:
    """Return the steps whose differences do not add up to 0; all workers call this together."""
    whole = collective.all_gather(np.array([differences.sum(dtype=np.uint64)]))
    if not np.concatenate(whole).sum(dtype=np.uint64):
        return []
    everyone = np.sum(collective.all_gather(differences), axis=0, dtype=np.uint64)
    return [int(step) for step in np.flatnonzero(everyone)]


def _add_up(step: int, rows: Index, edges: Index) -> Sums:
    """Return the sum of the rows' hashes in each step, modulo 2^64."""
    steps = np.repeat(np.arange(step, step + len(edges) - 1, dtype=np.uint64), np.diff(edges))
    # Of the first row in the first step, the hash would be 0.
    hashes = (rows.astype(np.uint64) + np.uint64(1)) * _ROWS + steps * _STEPS
    for shift, key in _MIXES:
        hashes = (hashes ^ (hashes >> shift)) * key
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    return np.diff(ends[edges])
