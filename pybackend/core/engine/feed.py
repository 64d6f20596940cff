"""Feed one worker's rows to Keras: local batches in the epoch's order, split as in `sharding`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective
from pybackend.core.data.arrays import nest
from pybackend.core.data.rows import Rows, to_rows
from pybackend.core.data.sharding import (
    EpochOrder,
    Groups,
    Index,
    SharedVisits,
    Visits,
    count_sharded,
    count_used,
    cut_batches,
    cut_shards,
    is_sharded_evenly,
    order_sharded,
    permute,
)
from pybackend.core.engine.audit.audited_rows import Ledger, Sums, find_wrong
from pybackend.core.engine.step_clock import Arrivals
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import counted
from pybackend.core.job.call_options import Shuffle
from pybackend.core.model.labels import check_are_classes

# Bytes that are read at once; a few such blocks are in memory at a time.
_BLOCK_BYTES = 2 << 20
# Larger batches are read one by one: to cut them out of a block costs more than reading them.
_LARGE_BATCH_BYTES = 512 << 10
_LABELS_AT_ONCE = 10_000
_ROWS_AT_ONCE = 16_384


@dataclass(frozen=True)
class _Pass:
    """Steps that use all rows once, or those of an epoch that other workers began.

    Attributes
    ----------
    edges
        First row of each local batch, and the end of the last one; int64 array of shape (world
        size, steps + 1).
    totals
        Number of rows in the global batch of each step.
    taken
        Number of steps that earlier worker groups took, in which no worker of this one has rows.
    """

    edges: Index
    totals: Index
    visits: Visits | SharedVisits
    taken: int = 0


class Feed:
    """A worker's shard as a ``tf.data.Dataset`` for one epoch, in that epoch's order.

    Parameters
    ----------
    columns
        The worker's rows; with ``shuffle="global"`` or ``has_all``, the rows of all workers.
    counts
        Number of rows that each worker uses in an epoch, by rank.
    shuffle
        ``"shard"`` (or True): a new order of the worker's rows in each epoch; ``"global"``: a new
        order of all rows, sharded across the workers; False: the original order.
    limit
        Steps per epoch; None: as many as it takes to use all rows. With fewer steps, the next epoch
        continues with the remaining rows; after all rows, a new order begins.
    batches
        Number of rows in each global batch, if ``batch_size`` does not determine it.
    has_all
        True if each worker has all rows, and uses its shard of them.

    Attributes
    ----------
    rows
        Number of rows that this worker uses in an epoch.
    steps
        Steps of this epoch.
    taken
        Steps of this epoch that earlier worker groups took.
    total_rows
        Number of rows in the global batch of each step; int64 array of shape (steps,).
    arrivals
        Times at which the batches of this epoch were read.
    is_sharded
        True if consecutive rows of a batch belong to consecutive ranks.
    """

    def __init__(
        self,
        columns: Rows | Mapping[str, Any],
        counts: Sequence[int],
        rank: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: Shuffle = False,
        limit: int | None = None,
        batches: Sequence[int] | None = None,
        has_all: bool = False,
    ) -> None:
        self._columns = to_rows(columns)
        self.counts = list(counts)
        self.rows = counts[rank]
        self.arrivals = Arrivals()
        self._rank = rank
        workers = len(counts)
        edges = cut_shards(counts, batch_size, batches)
        full = edges.shape[1] - 1
        if limit is not None and limit > full:
            raise InputError(
                f"`steps_per_epoch` is {limit}, but {sum(counts)} rows on {len(counts)} workers "
                f"give {counted(full, 'step')} of {batch_size} rows per worker"
            )
        self._steps_of_all = full if limit is None else limit
        self._cutting = batch_size, batches
        self._seeding = seed, shuffle
        self.is_sharded = not shuffle
        visits: Visits | SharedVisits
        if has_all or shuffle == "global":
            visits = SharedVisits(self._order_from(workers), 0, workers, rank)
        else:
            visits = Visits(len(self._columns), seed, rank, bool(shuffle))
        # Each worker has only its own rows, but these are shards of one order.
        self._is_dealt = isinstance(visits, Visits) and is_sharded_evenly(counts)
        self._whole = _Pass(edges, np.diff(edges.sum(axis=0)), visits)
        self._rest: tuple[int, _Pass] | None = None
        self._first_epoch: int | None = None
        self._enter(0)

    def _order_from(self, workers: int) -> EpochOrder:
        return EpochOrder(sum(self.counts), *self._seeding, workers)

    @property
    def may_be_empty(self) -> bool:
        """True if this worker group takes steps in which a worker has no rows."""
        passes = [self._whole, *([self._rest[1]] if self._rest else [])]
        return any((np.diff(one.edges)[:, one.taken :] == 0).any() for one in passes)

    def begins_again(self, epochs: int) -> bool:
        """Return whether an epoch continues with the first rows after the last ones."""
        steps, whole = self._steps_of_all, len(self._whole.totals)
        return bool(whole % steps) and epochs * steps > whole

    @property
    def begins_empty(self) -> bool:
        """True if a worker has no rows in the first step of an epoch."""
        return bool((np.diff(self._whole.edges)[:, 0] == 0).any())

    @property
    def most_steps(self) -> int:
        """Largest number of steps of an epoch."""
        return max(self._steps_of_all, len(self._rest[1].totals) if self._rest else 0)

    def continue_epoch(self, epoch: int, groups: Groups) -> None:
        """In this epoch, share the rows that earlier worker groups left; each has all rows."""
        batch_size, batches = self._cutting
        workers, rows = len(self.counts), len(self._columns)
        used = count_used(rows, groups, batch_size, batches)
        taken, total = len(used), sum(used)
        left = None if batches is None else batches[taken:]
        edges = cut_shards(count_sharded(rows - total, workers), batch_size, left)
        edges = np.concatenate([np.zeros((workers, taken), np.int64), edges], axis=1)
        totals = np.concatenate([used, np.diff(edges.sum(axis=0))[taken:]]).astype(np.int64)
        order = self._order_from(groups[0][0])
        visits = SharedVisits(order, total, workers, self._rank)
        self._rest = epoch, _Pass(edges, totals, visits, taken)

    def complete_class_weight(self, class_weight: dict[int, float]) -> dict[int, float]:
        """Add weight 1 for the classes without a weight: Keras looks up each class."""
        _, shape = self._columns.spec["y"]
        last = max(class_weight)
        if shape and shape[-1] > 1:  # one-hot
            last = max(last, shape[-1] - 1)
        else:
            for first in range(0, len(self._columns), _LABELS_AT_ONCE):
                places = np.arange(first, min(first + _LABELS_AT_ONCE, len(self._columns)))
                labels = self._columns.take(places)["y"]
                check_are_classes(labels, "data", names_rows=False)
                last = max(last, int(np.rint(labels.max())))
        return {number: class_weight.get(number, 1.0) for number in range(last + 1)}

    @property
    def fit_options(self) -> dict[str, Any]:
        """Arguments of ``fit`` that this data set needs: none."""
        return {}

    def resume(self, first_epoch: int) -> None:
        """Set the first epoch of a resumed training run, which determines the rows."""
        self._first_epoch = first_epoch

    def begin_epoch(self, epoch: int) -> None:
        """Use the rows in the order of an epoch."""
        if self._first_epoch is None:
            self._first_epoch = epoch
        self.arrivals.clear()
        self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        """Find the steps of an epoch among those of all rows."""
        self.epoch = epoch
        if self._rest is not None and epoch == self._rest[0]:
            self._pass = self._rest[1]
            self.steps = len(self._pass.totals)
            self._places, self._passes = np.arange(self.steps), np.full(self.steps, epoch)
        else:
            self._pass = self._whole
            self.steps = self._steps_of_all
            first_epoch = epoch if self._first_epoch is None else self._first_epoch
            passes, self._places = np.divmod(
                (epoch - first_epoch) * self.steps + np.arange(self.steps), len(self._pass.totals)
            )
            # Number of complete passes over the rows before; it determines the order.
            self._passes = first_epoch + passes
        self.taken = self._pass.taken
        self._rows_by_rank = np.diff(self._pass.edges)[:, self._places]
        self.total_rows = self._pass.totals[self._places]
        self._ledger = Ledger(self.steps)

    def count_steps(self, steps: int) -> None:
        """Do nothing: the rows of all steps are known."""

    def count_rows(self) -> int:
        """Return the number of rows that this worker uses in the epoch."""
        return int(self._rows_by_rank[self._rank].sum())

    def share(self) -> float:
        """Return this worker's share of the rows that this worker group uses in the epoch."""
        return float(self._rows_by_rank[self._rank].sum() / self._rows_by_rank.sum())

    def share_until(self, step: int) -> float:
        """Return its share of these rows before a step of an epoch that uses all rows."""
        rows = self._pass.edges[:, step]
        return float(rows[self._rank] / rows.sum())

    def rows_at(self, step: int) -> Any:
        """Return the size of every rank's local batch; int64 array of shape (world size,)."""
        return self._rows_by_rank[:, step]

    def order_at(self, step: int) -> Any:
        """Return the order of the batch among the rows of a step, listed rank by rank."""
        step = min(step, self.steps - 1)
        firsts = self._pass.edges[:, self._places[step]]
        return order_sharded(firsts, self._rows_by_rank[:, step])

    def read_step(self, step: int) -> tuple[Mapping[str, Any], int]:
        """Return this worker's columns of a step, and the number of its first row in the epoch."""
        place = int(self._places[step])
        first, end = self._pass.edges[self._rank, place : place + 2].tolist()
        visits = self._pass.visits.between(first, end, int(self._passes[step]))
        return self._columns.take(visits), first

    def find_misread(self, first: int, last: int, collective: Collective) -> Sequence[int]:
        """Return steps of this epoch that the workers trained on other rows; all call it together.

        Parameters
        ----------
        first, last
            First step that this worker group took, and the step after its last one.
        """
        differences = self.compare_rows(first, last)
        return [first + step for step in find_wrong(differences, collective)]

    def compare_rows(self, first: int, last: int) -> Sums:
        """Return how the ledger of some steps differs from their order; see `Ledger.subtract`."""
        return self._ledger.subtract(self._list_rows(first, last))[first:last]

    def _number(self, visits: Index) -> Index:
        """Return the numbers in the order of all rows of rows that this worker visits."""
        return visits * len(self.counts) + self._rank if self._is_dealt else visits

    def _list_rows(self, first: int, last: int) -> Iterator[tuple[int, Index, Index]]:
        """Yield the rows of steps, as `Ledger` notes them; of all workers', this one's share."""
        one, workers, rank = self._pass, len(self.counts), self._rank
        seed, shuffle = self._seeding
        shared = one.visits.order if isinstance(one.visits, SharedVisits) else None
        if self._is_dealt:
            shared = self._order_from(workers)
        edges = one.edges[rank]
        if shared is not None:
            totals, (batch_size, batches) = one.totals, self._cutting
            if one is self._whole and batches is None:
                totals = np.array(cut_batches(sum(self.counts), workers * batch_size))
            edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(totals)])
            taken = last - first
            first, last = first + taken * rank // workers, first + taken * (rank + 1) // workers
        at_once = max(1, _ROWS_AT_ONCE // max(1, int(np.diff(edges).max())))
        while first < last:
            place, epoch = int(self._places[first]), int(self._passes[first])
            count = min(at_once, last - first, len(edges) - 1 - place)
            parts = edges[place : place + count + 1]
            rows = np.arange(parts[0], parts[-1], dtype=np.int64)
            if shared is not None:
                rows = shared.at(rows, epoch)
            elif shuffle:
                rows = permute(rows, self.counts[rank], seed, epoch, rank)
            yield first, rows, parts - parts[0]
            first += count

    def dataset(self, skip: int = 0) -> Any:
        """Return the local batches of one epoch; Keras iterates over it again for each epoch.

        Parameters
        ----------
        skip
            Number of steps that are already done.
        """
        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        options.autotune.enabled = False
        # What another group began is read only with the steps that it took.
        one = self._rest[1] if self._rest is not None and skip else self._whole
        sizes = np.diff(one.edges[self._rank])
        steps = self._steps_of_all if one is self._whole else len(sizes)
        firsts, lasts = self._blocks(sizes, steps, skip)
        # AutoGraph would take a quarter of a second for a function that needs no conversion.
        read = tf.autograph.experimental.do_not_convert(self._read)
        epoch = tf.data.Dataset.from_tensor_slices((firsts, lasts)).map(read)
        if len(firsts) < steps - skip:
            epoch = epoch.prefetch(1).rebatch(sizes[skip:])
        epoch = epoch.apply(tf.data.experimental.assert_cardinality(steps - skip))
        return epoch.prefetch(2).with_options(options)

    def _blocks(self, sizes: Index, steps: int, skip: int) -> Any:
        """Return the first step of each block that is read in one go, and the step after it."""
        batch_bytes = max(1, self._columns.row_bytes * int(sizes.max(initial=1)))
        # tf.data drops batches without rows at the end, or adds some.
        is_cut = batch_bytes < _LARGE_BATCH_BYTES and sizes[skip:].min(initial=1) > 0
        is_cut = is_cut and steps == len(sizes)  # else epochs have steps of different sizes
        at_once = max(1, _BLOCK_BYTES // batch_bytes) if is_cut else 1
        firsts = np.arange(skip, steps, at_once)
        return firsts, np.append(firsts[1:], steps)

    def _read(self, first: Any, last: Any) -> Any:
        """Return the rows for the steps in a block."""
        spec = self._columns.spec

        def read(first: int, last: int) -> list[Any]:
            place = int(self._places[first])
            edges = self._pass.edges[self._rank]
            between = int(edges[place]), int(edges[place + last - first])
            visits = self._pass.visits.between(*between, int(self._passes[first]))
            parts = edges[place : place + last - first + 1] - between[0]
            self._ledger.note(int(first), self._number(visits), parts)
            values = list(self._columns.take(visits).values())
            self.arrivals.note(int(last - first))
            return values

        types = [tf.as_dtype(dtype) for dtype, _ in spec.values()]
        tensors = tf.numpy_function(read, [first, last], types, stateful=True)
        for tensor, (_, shape) in zip(tensors, spec.values(), strict=True):
            tensor.set_shape([None, *shape])
        return nest(dict(zip(spec, tensors, strict=True)))
