"""Rows that are audited: those of a step, packed for rank 0, and a ledger of all that were read.

The ledger shows that each row is read once per epoch, in its own step. A worker adds up hashes of
the numbers of its rows, step by step, while it reads them. At the end of an epoch the sums of all
workers must be those of the order that `replay_batches` lists, which is computed in another way:
from the whole order, cut into steps. An error of any kind, such as a row that is read twice or in
another step, changes a sum of 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from pybackend.core.collective import Collective
from pybackend.core.data.arrays import nest
from pybackend.core.data.sharding import Index, order_sharded
from pybackend.core.words import show

Array = npt.NDArray[Any]


class UnequalRows(Exception):
    """Rows of several workers that cannot form a batch, e.g. because they differ in shape."""


@dataclass(frozen=True)
class GlobalRows:
    """Rows of all workers at one step."""

    batch: Any  # `x`, `(x, y)` or `(x, y, sample_weight)` of arrays
    parts: list[Array]  # positions of each worker's rows in the batch, by rank

    @property
    def counts(self) -> Array:
        return np.array([len(part) for part in self.parts])

    def reordered(self) -> GlobalRows:
        order = np.random.default_rng(0).permutation(sum(self.counts))
        batch = keras.tree.map_structure(lambda column: column[order], self.batch)
        return GlobalRows(batch, [np.argsort(order)[part] for part in self.parts])

    def of_rank(self, rank: int) -> GlobalRows:
        part = self.parts[rank]
        batch = keras.tree.map_structure(lambda column: column[part], self.batch)
        return GlobalRows(batch, [np.arange(len(part))])


def pack_rows(columns: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Pack one worker's rows of a step, the first of which is its own row number ``first``."""
    return {"first": first, "columns": {name: np.asarray(one) for name, one in columns.items()}}


def unpack_rows(everyone: Sequence[Mapping[str, Any]], is_sharded: bool) -> GlobalRows:
    """Unpack the rows from `pack_rows` of each rank into one batch, or raise `UnequalRows`.

    If ``is_sharded``, consecutive rows of the batch belong to consecutive ranks; else the rows are
    listed rank by rank.
    """
    columns = [part["columns"] for part in everyone]
    counts = [len(next(iter(one.values()))) for one in columns]
    with_rows = [one for one, count in zip(columns, counts, strict=True) if count]
    ranks = np.repeat(np.arange(len(counts)), counts)
    if not with_rows:
        raise UnequalRows("no worker can read the rows of the step again")
    firsts = [one["first"] for one in everyone]
    order = order_sharded(firsts, counts) if is_sharded else np.arange(len(ranks))
    shapes = {name: {one[name].shape[1:] for one in with_rows} for name in columns[0]}
    for name, found in shapes.items():
        if len(found) > 1:
            raise UnequalRows(f"rows of {show(name)} have different shapes on different workers")
    joined = {name: np.concatenate([one[name] for one in with_rows])[order] for name in shapes}
    parts = [np.flatnonzero(ranks[order] == rank) for rank in range(len(counts))]
    return GlobalRows(nest(joined), parts)


Sums = npt.NDArray[np.uint64]
# Multipliers of rows and steps, and the finalizer of SplitMix64 (Steele et al., 2014).
_ROWS, _STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_MIXES = [
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
]


class Ledger:
    def __init__(self, steps: int) -> None:
        self.sums = np.zeros(steps, np.uint64)

    def note(self, step: int, rows: Index, edges: Index) -> None:
        """Note that rows were read for some steps, the first of which is ``step``.

        ``rows`` are the numbers of the rows in the epoch's order; ``edges`` has the first row of
        each step among these, and the end of the last one.
        """
        self.sums[step : step + len(edges) - 1] += _add_up(step, rows, edges)

    def subtract(self, expected: Iterable[tuple[int, Index, Index]]) -> Sums:
        """Return how the sums differ from those of other rows, given as `note` takes them.

        Over the workers, the differences of a step add up to 0, modulo 2^64, if these are all of
        its rows.
        """
        right = Ledger(len(self.sums))
        for one in expected:
            right.note(*one)
        return self.sums - right.sums


def find_wrong(differences: Sums, collective: Collective) -> list[int]:
    """Return the steps whose differences do not add up to 0; all workers call this together."""
    # One number per worker, almost always: the sums of all steps are sent only if it is wrong.
    whole = collective.all_gather(np.array([differences.sum(dtype=np.uint64)]))
    if not np.concatenate(whole).sum(dtype=np.uint64):
        return []
    everyone = np.sum(collective.all_gather(differences), axis=0, dtype=np.uint64)
    return [int(step) for step in np.flatnonzero(everyone)]


def _add_up(step: int, rows: Index, edges: Index) -> Sums:
    steps = np.repeat(np.arange(step, step + len(edges) - 1, dtype=np.uint64), np.diff(edges))
    # Of the first row in the first step, the hash would be 0.
    hashes = (rows.astype(np.uint64) + np.uint64(1)) * _ROWS + steps * _STEPS
    for shift, key in _MIXES:
        hashes = (hashes ^ (hashes >> shift)) * key
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    return np.diff(ends[edges])
