"""Which rows a worker uses at which step: each row exactly once per epoch.

With c_w rows on worker w and at most b rows per local batch, an epoch has
S = max over w of ceil(c_w / b) steps, and worker w takes at step s its rows
[floor(c_w s / S), floor(c_w (s + 1) / S)). Every worker takes part in every step, none waits for
a batch that does not come, none drops a row, and unequal shards are used up at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.job import Shuffle

Index = npt.NDArray[np.int64]


def steps_per_epoch(counts: Sequence[int], batch_size: int) -> int:
    """Steps in which workers with ``counts`` rows use each row once."""
    return max(-(-count // batch_size) for count in counts)


def bounds(count: int, steps: int) -> Index:
    """First row of each step's local batch, and the end of the last; shape (steps + 1,)."""
    return np.arange(steps + 1, dtype=np.int64) * count // steps


def order(count: int, seed: int, epoch: int, rank: int, shuffle: bool) -> Index:
    """Order in which a worker visits its rows in one epoch; a permutation of range(count).

    The permutation is a function of (seed, epoch, rank) alone, so a run can be repeated, and
    a single process can replay what many did.
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64([seed, epoch, rank]))
    return generator.permutation(count).astype(np.int64, copy=False)


def order_of_all(rows: int, seed: int, epoch: int) -> Index:
    """Order of all rows in an epoch, the same on every worker; worker r takes every N-th from r."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(rows).astype(np.int64, copy=False)


def deal(rows: int, workers: int, rank: int) -> slice:
    """Rows of an array that go to ``rank``: every ``workers``-th, so sorted data stay mixed."""
    return slice(rank, rows, workers)


def global_batches(
    rows: int, workers: int, batch_size: int, *, seed: int, epoch: int, shuffle: Shuffle = True
) -> list[Any]:
    """Rows of an array that all workers together use at each step of an epoch.

    Training one process on these batches gives the weights that ``workers`` processes reach.

    Returns
    -------
    list of int64 arrays
        One per step; together a permutation of ``range(rows)``.
    """
    everything = np.arange(rows, dtype=np.int64)
    if shuffle == "global":
        everything = order_of_all(rows, seed, epoch)
    shards = [everything[deal(rows, workers, rank)] for rank in range(workers)]
    counts = [len(shard) for shard in shards]
    steps = steps_per_epoch(counts, batch_size)
    within = bool(shuffle) and shuffle != "global"
    visits = [
        shard[order(len(shard), seed, epoch, rank, within)] for rank, shard in enumerate(shards)
    ]
    edges = [bounds(count, steps) for count in counts]
    return [
        np.concatenate([v[e[s] : e[s + 1]] for v, e in zip(visits, edges, strict=True)])
        for s in range(steps)
    ]
