"""Assignment of rows to workers and steps: each row is used exactly once per epoch.

Rows that have one order, such as those of arrays, are cut as Keras cuts them: with W workers and at
most b rows per local batch, step s takes rows [s W b, (s + 1) W b) of the epoch's order, and worker
w every W-th of them, from the w-th on. The last step takes what is left, even if some workers then
have no row.

Shards that workers bring along, such as a table's partitions, have sizes of their own. With c_w
rows on worker w, an epoch has S = max over w of ceil(c_w / b) steps, and at step s worker w takes
its rows [floor(c_w s / S), floor(c_w (s + 1) / S)). Every worker takes part in every step, so that
none waits for a missing batch; no row is dropped, and unequal shards end at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_choice, check_flag, check_whole_number
from pybackend.core.job.call_options import Shuffle
from pybackend.core.job.report import Generation, list_groups
from pybackend.core.words import show

Index = npt.NDArray[np.int64]
Ranges = Sequence[tuple[int, int]]
# Rows of each global batch; None: they follow from the number of rows in a local batch.
Sizes = Sequence[int] | None
_ROUNDS = 6
# Number of ranges of a worker's rows: many, so that rows sorted by label are mixed.
_TURNS = 64
_BLOCK = 8192


def count_steps(counts: Sequence[int], batch_size: int) -> int:
    """Return the number of steps in which workers with ``counts`` rows use each row once."""
    return max(-(-count // batch_size) for count in counts)


def cut_rows(count: int, steps: int) -> Index:
    """Return the first row of each step's local batch, and the end of the last batch."""
    return np.arange(steps + 1, dtype=np.int64) * count // steps


def cut_batches(rows: int, size: int) -> list[int]:
    """Return the sizes of Keras's batches of some rows: all have ``size`` rows except the last."""
    return [min(size, rows - first) for first in range(0, rows, size)]


def is_sharded_evenly(counts: Sequence[int]) -> bool:
    """True if workers have the numbers of rows that shards of one order have."""
    return list(counts) == count_sharded(sum(counts), len(counts))


def cut_shards(counts: Sequence[int], batch_size: int, batches: Sizes = None) -> Index:
    """Return the first row of each worker's local batches, as a row number in its shard.

    The int64 array has the shape (workers, steps + 1): its last column is the end of the last
    batches. ``batches`` are the rows of each global batch, if ``batch_size`` does not determine
    them.
    """
    workers = len(counts)
    if batches is None and is_sharded_evenly(counts):
        batches = cut_batches(sum(counts), workers * batch_size)
    if batches is not None:
        return np.stack([share_batches(batches, workers, rank) for rank in range(workers)])
    steps = count_steps(counts, batch_size)
    return np.stack([cut_rows(count, steps) for count in counts])


def permute(positions: Index, count: int, *keys: int) -> Index:
    """Return the new positions of some of ``range(count)`` under the permutation given by ``keys``.

    It needs no array of ``count`` numbers, so that data of any size can be shuffled. It is a
    generalized Feistel cipher with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). Its round function is the finalizer of SplitMix64 (Steele et al., "Fast
    splittable pseudorandom number generators", 2014) without the last step, which does not change
    the high bits: only these are used.
    """
    if count < 2:
        return positions.copy()
    left = math.isqrt(count - 1) + 1
    right = -(-count // left)
    rounds = np.random.SeedSequence(keys).generate_state(_ROUNDS, np.uint64)
    found = _encipher(positions.astype(np.uint64), left, right, rounds)
    # The cipher permutes left x right numbers, a few more than ``count``: encipher those again.
    while (outside := np.flatnonzero(found >= count)).size:
        found[outside] = _encipher(found[outside], left, right, rounds)
    moved: Index = found.astype(np.int64)
    return moved


def _encipher(numbers: Any, left: int, right: int, rounds: Any) -> Any:
    other = numbers // np.uint64(left)
    one = numbers - other * np.uint64(left)
    for number, key in enumerate(rounds):
        size = np.uint64(right if number % 2 else left)
        # The high half of a random number times the size is a random number below the size; this is
        # much faster than a division.
        moved = one + ((_mix(other ^ key) >> np.uint64(32)) * size >> np.uint64(32))
        # If moved < size, the difference wraps around to a huge number.
        one, other = other, np.minimum(moved, moved - size)
    return one + other * np.uint64(left)


def _mix(numbers: Any) -> Any:
    """Mix numbers so that the high bits depend on all bits of the input."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)


class _InBlocks:
    """Visits of rows in an epoch, of which whole blocks are drawn: each serves many steps."""

    def draw(self, first: int, last: int, epoch: int) -> Index:
        """Return the rows of visits ``first`` to ``last`` - 1, or up to the last one."""
        raise NotImplementedError

    def between(self, first: int, last: int, epoch: int) -> Index:
        """Return the rows of visits ``first`` to ``last`` - 1 of an epoch."""
        numbers = range(first // _BLOCK, max(first, last - 1) // _BLOCK + 1)
        start = numbers.start * _BLOCK
        blocks = [_draw_block(self, epoch, number) for number in numbers]
        return np.concatenate(blocks)[first - start : last - start]


@lru_cache(maxsize=2)
def _draw_block(visits: _InBlocks, epoch: int, number: int) -> Index:
    return visits.draw(number * _BLOCK, (number + 1) * _BLOCK, epoch)


@dataclass(frozen=True)
class Visits(_InBlocks):
    """Order in which a worker visits rows that it holds alone.

    The order is a function of (seed, epoch, rank) alone, so a run can be repeated, and a single
    process can replay the order of many.
    """

    rows: int  # that the worker holds
    seed: int
    rank: int
    shuffle: bool

    def draw(self, first: int, last: int, epoch: int) -> Index:
        positions = np.arange(first, min(last, self.rows), dtype=np.int64)
        keys = self.seed, epoch, self.rank
        return permute(positions, self.rows, *keys) if self.shuffle else positions


@dataclass(frozen=True)
class EpochOrder:
    """Order of all rows in an epoch that several worker groups may train, one after another.

    N workers use the rows from a position on together: worker r uses every N-th of them, from the
    r-th on. In each step, all workers together use the next rows of this order, because the numbers
    of rows of two workers differ by at most one. So the rows that are left after any step are the
    end of the order, and the next group shares them in the same way.

    ``workers`` is the size of the first group. It determines the order, except with
    ``shuffle="global"``.
    """

    rows: int
    seed: int
    shuffle: Shuffle
    workers: int

    def at(self, positions: Index, epoch: int) -> Index:
        """Return the numbers of the rows at some positions of the order."""
        if not self.shuffle:
            return positions.astype(np.int64)
        if self.shuffle == "global":
            return permute(positions, self.rows, self.seed, epoch)
        found = np.empty(len(positions), np.int64)
        visits, ranks = np.divmod(positions, self.workers)
        for rank in np.unique(ranks).tolist():
            own = ranks == rank
            count = len(range(rank, self.rows, self.workers))
            found[own] = permute(visits[own], count, self.seed, epoch, rank) * self.workers + rank
        return found


@dataclass(frozen=True)
class SharedVisits(_InBlocks):
    """Order in which a worker that holds all rows visits its share of the rest of an epoch.

    ``used`` rows were used by earlier worker groups in this epoch. ``workers`` and ``rank`` are
    those of the worker's own group.
    """

    order: EpochOrder
    used: int
    workers: int
    rank: int

    def draw(self, first: int, last: int, epoch: int) -> Index:
        """The numbers are those among all rows."""
        begin, end = (self.used + self.rank + number * self.workers for number in (first, last))
        positions = np.arange(begin, min(end, self.order.rows), self.workers, dtype=np.int64)
        return self.order.at(positions, epoch)


Groups = Sequence[tuple[int, int]]
"""Worker groups that trained the beginning of an epoch: their workers, and the steps they took."""


def count_used(rows: int, groups: Groups, batch_size: int, batches: Sizes = None) -> list[int]:
    """Return the number of rows in each step that worker groups took, one after another."""
    used: list[int] = []
    for workers, steps in groups:
        left = None if batches is None else batches[len(used) :]
        edges = cut_shards(count_sharded(rows - sum(used), workers), batch_size, left)
        used += np.diff(edges.sum(axis=0))[:steps].tolist()
    return used


def shard_slice(rows: int, workers: int, rank: int) -> slice:
    """Every ``workers``-th row, to spread sorted data."""
    return slice(rank, rows, workers)


def count_sharded(rows: int, workers: int) -> list[int]:
    """Return the number of rows in each rank's `shard_slice`."""
    return [len(range(rank, rows, workers)) for rank in range(workers)]


def cut_ranges(rows: int, workers: int, in_turn: bool = True) -> list[list[tuple[int, int]]]:
    """Return each worker's ranges of the rows of files, in order.

    With ``in_turn``, small ranges are assigned to the workers in turn, so that sorted rows are
    mixed; else each worker has one range.
    """
    turns = _TURNS if in_turn else 1
    found: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    first = 0
    for turn in range(turns):
        for rank, count in enumerate(count_sharded(rows, workers)):
            last = first + count * (turn + 1) // turns - count * turn // turns
            if first < last:
                found[rank].append((first, last))
            first = last
    return found


def order_sharded(firsts: Sequence[int] | Index, counts: Sequence[int] | Index) -> Index:
    """Return the order that restores the data's, for a range in each `shard_slice`.

    ``firsts`` and ``counts`` are the first row of the range in each rank's shard, and its number of
    rows. The int64 array has an index among the rows of all ranks, listed rank by rank, for each
    row.
    """
    ranks = np.repeat(np.arange(len(counts)), counts)
    own = [first + np.arange(count) for first, count in zip(firsts, counts, strict=True)]
    return np.lexsort((ranks, np.concatenate(own)))


def share_batches(sizes: Sequence[int], workers: int, rank: int) -> Index:
    """Return the start of a worker's share of each batch, as a row number in its `shard_slice`.

    ``sizes`` are the rows of each step's global batch. The last of the (steps + 1,) numbers is the
    end of the last share.
    """
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return np.maximum(0, -(-(ends - rank) // workers))


def replay_batches(
    rows: int,
    workers: int | Sequence[Generation],
    batch_size: int,
    *,
    epoch: int,
    seed: int | None = None,
    shuffle: Shuffle = True,
    files: bool = False,
) -> list[Any]:
    """List the rows that all workers together use at each step of an epoch.

    One process that trains on these batches ends with the same weights as ``workers`` processes.
    They are as large as those of Keras's ``fit`` with ``batch_size=workers * batch_size``; with
    ``shuffle=False`` they are the same rows.

    Parameters
    ----------
    rows
        Number of rows. Rows of arrays and data frames are numbered in order. Rows of files are
        numbered file by file, in the order of the sorted paths or of the list of paths.
        The rows of a Spark DataFrame have no order.
    workers
        Number of workers. After elastic training, ``result.generations``: several worker groups may
        have trained parts of one epoch.
    batch_size, seed, shuffle
        As in `barrier_train`. If no seed was passed to training, use ``result.seed``; without
        shuffling it is not needed.
    epoch
        Index of the epoch, from 0. With ``steps_per_epoch``, an epoch here still uses all rows:
        training takes its steps from these lists, one after another.

    files
        True if workers read files: each has ranges of them, which it shuffles. As in
        `barrier_train` with ``repartition`` on.

    Returns
    -------
    list of int64 arrays
        One array per step; together a permutation of ``range(rows)``.

    Raises
    ------
    InputError
        An argument is invalid. The message names it and the expected value.
    """
    rows = check_whole_number("rows", rows, least=1)
    batch_size = check_whole_number("batch_size", batch_size, least=1)
    if shuffle and seed is None:
        raise InputError("`seed` must be that of the training: `result.seed`")
    seed = check_whole_number("seed", seed or 0, least=0)
    epoch = check_whole_number("epoch", epoch, least=0)
    check_flag("files", files)
    check_choice("shuffle", shuffle, choices=[True, False, "shard", "global"])
    *earlier, (last, _) = _find_groups(workers, epoch)
    order = EpochOrder(rows, seed, shuffle, earlier[0][0] if earlier else last)
    whole = order.at(np.arange(rows, dtype=np.int64), epoch)
    batches: list[Any] = []
    for number, (count, steps) in enumerate([*earlier, (last, None)]):
        used = sum(count_used(rows, earlier[:number], batch_size))
        if used < rows:
            edges = cut_shards(count_sharded(rows - used, count), batch_size).sum(axis=0)
            batches += np.split(whole[used:], edges[1:-1])[:steps]
    # Elastic workers read whole files, and so do those that shuffle all rows; without shuffling,
    # each reads every N-th row.
    if files and shuffle in (True, "shard") and isinstance(workers, int):
        numbers = np.empty(rows, np.int64)
        for rank, ranges in enumerate(cut_ranges(rows, workers)):
            numbers[rank::workers] = np.concatenate([np.arange(*one) for one in ranges])
        batches = [numbers[batch] for batch in batches]
    return batches


def _find_groups(workers: Any, epoch: int) -> list[tuple[int, int]]:
    if isinstance(workers, Sequence) and not isinstance(workers, str):
        if not workers or not all(isinstance(one, Generation) for one in workers):
            raise InputError("`workers` must be a whole number, or `result.generations`")
        groups = list_groups(workers, epoch + 1)
        if not groups:
            raise InputError(f"`epoch` must be one of the trained epochs, not {show(epoch)}")
        return groups
    return [(check_whole_number("workers", workers, least=1), 0)]
