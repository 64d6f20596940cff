"""Local batches of one worker: of its rows, in each epoch's order, or of a custom pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_sum
from pybackend.core.data import sharding
from pybackend.core.data.arrays import flatten, nest
from pybackend.core.data.rows import ArrayRows, Rows, to_rows
from pybackend.core.data.sharding import Index
from pybackend.core.engine.audit.audited_rows import Ledger, Sums, find_wrong
from pybackend.core.engine.step_changes import count_rows
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

    ``edges`` is the first row of each local batch, and the end of the last one: int64, (world size,
    steps + 1). ``totals`` is the number of rows in the global batch of each step. Earlier worker
    groups took the first ``taken`` steps, in which no worker of this one has rows.
    """

    edges: Index
    totals: Index
    visits: sharding.Visits | sharding.SharedVisits
    taken: int = 0


class RowBatches:
    """A worker's shard as a ``tf.data.Dataset`` for one epoch, in that epoch's order.

    ``columns`` are the worker's rows; with ``shuffle="global"`` or ``has_all``, the rows of all
    workers. ``counts`` is the number of rows that each worker uses in an epoch, by rank.
    ``shuffle`` is ``"shard"`` (or True) for a new order of the worker's rows in each epoch,
    ``"global"`` for a new order of all rows, sharded across the workers, or False for the original
    order.

    ``limit`` is the number of steps per epoch; None: as many as it takes to use all rows. With
    fewer steps, the next epoch continues with the remaining rows; after all rows, a new order
    begins. ``batches`` has the number of rows in each global batch, if ``batch_size`` does not
    determine it.
    """

    is_uneven = False

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
        self.counts, self._rank = list(counts), rank
        self.rows = counts[rank]
        """Number of rows that this worker uses in an epoch."""
        self.arrivals = Arrivals()
        """Times at which the batches of this epoch were read."""
        self.fit_options: dict[str, Any] = {}
        """Arguments of ``fit`` that these batches need."""
        workers = len(counts)
        edges = sharding.cut_shards(counts, batch_size, batches)
        full = edges.shape[1] - 1
        if limit is not None and limit > full:
            raise InputError(
                f"`steps_per_epoch` is {limit}, but {sum(counts)} rows on {len(counts)} workers "
                f"give {counted(full, 'step')} of {batch_size} rows per worker"
            )
        self._steps_of_all = self.most_steps = full if limit is None else limit
        self._cutting = batch_size, batches
        self._seeding = seed, shuffle
        self.is_sharded = not shuffle
        """True if consecutive rows of a batch belong to consecutive ranks."""
        visits: sharding.Visits | sharding.SharedVisits
        if has_all or shuffle == "global":
            visits = sharding.SharedVisits(self._order_from(workers), 0, workers, rank)
        else:
            visits = sharding.Visits(len(self._columns), seed, rank, bool(shuffle))
        # Each worker has only its own rows, but these are shards of one order.
        self._is_dealt = isinstance(visits, sharding.Visits) and sharding.is_sharded_evenly(counts)
        self._whole = _Pass(edges, np.diff(edges.sum(axis=0)), visits)
        self.begins_empty = bool((np.diff(edges)[:, 0] == 0).any())
        """True if a worker has no rows in the first step of an epoch."""
        self._rest: tuple[int, _Pass] | None = None
        self._first_epoch: int | None = None
        self._enter(0)

    def _order_from(self, workers: int) -> sharding.EpochOrder:
        return sharding.EpochOrder(sum(self.counts), *self._seeding, workers)

    @property
    def may_be_empty(self) -> bool:
        """True if this worker group takes steps in which a worker has no rows."""
        passes = [self._whole, *([self._rest[1]] if self._rest else [])]
        return any((np.diff(one.edges)[:, one.taken :] == 0).any() for one in passes)

    def begins_again(self, epochs: int) -> bool:
        """Return whether an epoch continues with the first rows after the last ones."""
        steps, whole = self._steps_of_all, len(self._whole.totals)
        return bool(whole % steps) and epochs * steps > whole

    def continue_epoch(self, epoch: int, groups: sharding.Groups) -> None:
        """In this epoch, share the rows that earlier worker groups left; each has all rows."""
        batch_size, batches = self._cutting
        workers, rows = len(self.counts), len(self._columns)
        used = sharding.count_used(rows, groups, batch_size, batches)
        taken, total = len(used), sum(used)
        left = None if batches is None else batches[taken:]
        edges = sharding.cut_shards(sharding.count_sharded(rows - total, workers), batch_size, left)
        edges = np.concatenate([np.zeros((workers, taken), np.int64), edges], axis=1)
        totals = np.concatenate([used, np.diff(edges.sum(axis=0))[taken:]]).astype(np.int64)
        order = self._order_from(groups[0][0])
        visits = sharding.SharedVisits(order, total, workers, self._rank)
        self._rest = epoch, _Pass(edges, totals, visits, taken)
        self.most_steps = max(self._steps_of_all, len(totals))

    def complete_class_weight(self, class_weight: dict[int, float]) -> dict[int, float]:
        """Add weight 1 for the classes without a weight: Keras looks up each class."""
        _, shape = self._columns.spec["y"]
        is_one_hot, count = bool(shape) and shape[-1] > 1, len(self._columns)
        last = max(*class_weight, shape[-1] - 1 if is_one_hot else 0)
        for first in range(0, 0 if is_one_hot else count, _LABELS_AT_ONCE):
            rows = np.arange(first, min(first + _LABELS_AT_ONCE, count))
            labels = self._columns.take(rows)["y"]
            check_are_classes(labels, "data", names_rows=False)
            last = max(last, int(np.rint(labels.max())))
        return {number: class_weight.get(number, 1.0) for number in range(last + 1)}

    def resume(self, first_epoch: int) -> None:
        """Set the first epoch of a resumed training run, which determines the rows."""
        self._first_epoch = first_epoch

    def begin_epoch(self, epoch: int) -> None:
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        self.arrivals.clear()
        self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        """Find the steps of an epoch among those of all rows."""
        self.epoch = epoch
        if self._rest is not None and epoch == self._rest[0]:
            self._pass = self._rest[1]
            self.steps = len(self._pass.totals)
            self._indices, self._passes = np.arange(self.steps), np.full(self.steps, epoch)
        else:
            self._pass = self._whole
            self.steps = self._steps_of_all
            first_epoch = epoch if self._first_epoch is None else self._first_epoch
            numbers = (epoch - first_epoch) * self.steps + np.arange(self.steps)
            passes, self._indices = np.divmod(numbers, len(self._pass.totals))
            # Number of complete passes over the rows before; it determines the order.
            self._passes = first_epoch + passes
        self.taken = self._pass.taken
        """Steps of this epoch that earlier worker groups took."""
        self._rows_by_rank = np.diff(self._pass.edges)[:, self._indices]
        self.total_rows = self._pass.totals[self._indices]
        """Number of rows in the global batch of each step; int64 array of shape (steps,)."""
        self._ledger = Ledger(self.steps)

    def count_steps(self, steps: int) -> None:
        """Do nothing: the rows of all steps are known."""

    def count_rows(self) -> int:
        """Return the number of rows that this worker uses in the epoch."""
        return int(self._rows_by_rank[self._rank].sum())

    def share(self) -> float:
        """Return this worker's share of the rows that this worker group uses in the epoch."""
        return float(self.count_rows() / self._rows_by_rank.sum())

    def share_until(self, step: int) -> float:
        """Return its share of these rows before a step of an epoch that uses all rows."""
        return float(self._pass.edges[self._rank, step] / self._pass.edges[:, step].sum())

    def rows_at(self, step: int) -> Any:
        """Return the size of every rank's local batch; int64 array of shape (world size,)."""
        return self._rows_by_rank[:, step]

    def order_at(self, step: int) -> Any:
        """Return the order of the batch among the rows of a step, listed rank by rank."""
        step = min(step, self.steps - 1)
        firsts = self._pass.edges[:, self._indices[step]]
        return sharding.order_sharded(firsts, self._rows_by_rank[:, step])

    @property
    def find_order(self) -> Callable[[int], Any] | None:
        """`order_at`, if consecutive rows of a batch belong to consecutive ranks."""
        return self.order_at if self.is_sharded else None

    def read_step(self, step: int) -> tuple[Mapping[str, Any], int]:
        """Return this worker's columns of a step, and the number of its first row in the epoch."""
        index = int(self._indices[step])
        first, end = self._pass.edges[self._rank, index : index + 2].tolist()
        visits = self._pass.visits.between(first, end, int(self._passes[step]))
        return self._columns.take(visits), first

    def find_misread(self, first: int, last: int, collective: Collective) -> Sequence[int]:
        """Return steps of this epoch that the workers trained on other rows; all call it together.

        ``first`` is the first step that this worker group took, ``last`` the step after its last
        one.
        """
        return [first + step for step in find_wrong(self.compare_rows(first, last), collective)]

    def compare_rows(self, first: int, last: int) -> Sums:
        """Return how the ledger of some steps differs from their order; see `Ledger.subtract`."""
        return self._ledger.subtract(self._list_rows(first, last))[first:last]

    def _list_rows(self, first: int, last: int) -> Iterator[tuple[int, Index, Index]]:
        """Yield the rows of steps, as `Ledger` notes them; of all workers', this one's share."""
        one, workers, rank = self._pass, len(self.counts), self._rank
        seed, shuffle = self._seeding
        shared = one.visits.order if isinstance(one.visits, sharding.SharedVisits) else None
        if self._is_dealt:
            shared = self._order_from(workers)
        edges = one.edges[rank]
        if shared is not None:
            totals, (batch_size, batches) = one.totals, self._cutting
            if one is self._whole and batches is None:
                totals = np.array(sharding.cut_batches(sum(self.counts), workers * batch_size))
            edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(totals)])
            taken = last - first
            first, last = first + taken * rank // workers, first + taken * (rank + 1) // workers
        at_once = max(1, _ROWS_AT_ONCE // max(1, int(np.diff(edges).max())))
        while first < last:
            index, epoch = int(self._indices[first]), int(self._passes[first])
            count = min(at_once, last - first, len(edges) - 1 - index)
            parts = edges[index : index + count + 1]
            rows = np.arange(parts[0], parts[-1], dtype=np.int64)
            if shared is not None:
                rows = shared.at(rows, epoch)
            elif shuffle:
                rows = sharding.permute(rows, self.counts[rank], seed, epoch, rank)
            yield first, rows, parts - parts[0]
            first += count

    def dataset(self, skip: int = 0) -> Any:
        """Return the local batches of one epoch, without the first ``skip`` steps.

        Keras iterates over it again for each epoch.
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
            index = int(self._indices[first])
            edges = self._pass.edges[self._rank]
            between = int(edges[index]), int(edges[index + last - first])
            visits = self._pass.visits.between(*between, int(self._passes[first]))
            parts = edges[index : index + last - first + 1] - between[0]
            is_part = self._is_dealt  # then its rows have other numbers in the order of all
            rows = visits * len(self.counts) + self._rank if is_part else visits
            self._ledger.note(int(first), rows, parts)
            values = list(self._columns.take(visits).values())
            self.arrivals.note(int(last - first))
            return values

        types = [tf.as_dtype(dtype) for dtype, _ in spec.values()]
        tensors = tf.numpy_function(read, [first, last], types, stateful=True)
        for tensor, (_, shape) in zip(tensors, spec.values(), strict=True):
            tensor.set_shape([None, *shape])
        return nest(dict(zip(spec, tensors, strict=True)))


class PipelineBatches:
    """Custom ``tf.data.Dataset`` as local batches, in place of `RowBatches`.

    An epoch has ``limit`` steps, or else one step for each batch of the longest data set of any
    worker. If a worker's own batches end earlier, batches without rows follow. If a data set's
    length is unknown, it is read once to count its batches, unless there is a ``limit``. An endless
    data set requires a ``limit``, and continues from epoch to epoch.

    ``data`` has elements of ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
    """

    total_rows = None
    """None: no worker knows how many rows the others will have in a step."""
    taken = 0
    is_sharded = False
    find_order = None

    def __init__(self, data: Any, collective: Collective, limit: int | None) -> None:
        self._collective, self._data = collective, data
        # Rows of the batches that TensorFlow has read, ahead of the training.
        self._read: deque[int] = deque()
        self.epoch, self.rows = 0, 0
        self._steps_taken, self._last_rows = 0, 0
        self._first: Any = None
        self.arrivals = Arrivals()
        own = int(data.cardinality())
        unknown = own == tf.data.UNKNOWN_CARDINALITY
        # It continues from epoch to epoch, as in Keras.
        self.is_endless = own == tf.data.INFINITE_CARDINALITY or (unknown and limit is not None)
        if unknown and limit is None:
            own = int(data.reduce(np.int64(0), lambda count, _: count + 1))
        first = next(iter(data.take(1).as_numpy_iterator()), None)
        if first is None:
            first = tf.nest.map_structure(lambda tensor: tensor.numpy(), self._make_empty())
        leaves = flatten(first)
        uneven = len({len(leaf) for leaf in leaves.values()}) > 1
        everyone = collective.all_gather(np.array([own, unknown, uneven], np.int64))
        batches = [int(count) for count, _, _ in everyone]
        self.steps = self.most_steps = self._count_epoch_steps(batches, limit)
        self.fit_options = {"steps_per_epoch": self.steps} if self.is_endless else {}
        # A pipeline that was read once need not return the same number of batches again.
        is_sure = not any(unknown for _, unknown, _ in everyone)
        self.may_be_empty = not is_sure or any(0 <= count < self.steps for count in batches)
        self.begins_empty = self.may_be_empty
        self.is_uneven = any(uneven for _, _, uneven in everyone)
        """True if arrays of a batch have different numbers of rows; those of ``y`` are counted."""
        if self.is_uneven:  # rows of different arrays do not correspond
            leaves = {key: leaf[:0] for key, leaf in leaves.items()}
        self.sample = ArrayRows(leaves)

    @staticmethod
    def _count_epoch_steps(batches: list[int], limit: int | None) -> int:
        """Return the steps per epoch; negative numbers of batches mean endless or unknown."""
        endless, most = [rank for rank, count in enumerate(batches) if count < 0], max(batches)
        if limit is None and endless:
            raise InputError(
                f"the `data` function returns infinite data on worker {endless[0]}: pass "
                "`steps_per_epoch`"
            )
        if not endless and most == 0:
            raise InputError("the `data` function returned no batches on any worker")
        if limit is not None and not endless and limit > most:
            raise InputError(
                f"`steps_per_epoch` is {limit}, but the `data` function returns at "
                f"most {most} batches on a worker"
            )
        return limit or most

    def rows_at(self, step: int) -> Any:
        """Return the size of every rank's local batch at the last step, in shape (world size,).

        Raises `InputError` if no rank has rows: the pipeline returned fewer batches than the first
        time, or fewer than `steps_per_epoch` requires.
        """
        rows = np.concatenate(self._collective.all_gather(np.array([self._last_rows], np.int64)))
        if not rows.any():
            raise InputError(
                f"the `data` function returned no rows for step {self._steps_taken} "
                f"of {self.steps} on any worker: a pipeline must return its batches in every "
                "epoch, not only once (an iterator is used up after one pass), and as many of "
                "them as `steps_per_epoch` requires"
            )
        return rows

    def find_misread(self, first: int, last: int, collective: Collective) -> Sequence[int]:
        """Return nothing: the rows have no numbers."""
        return []

    def count_rows(self) -> int:
        """Return the number of this worker's rows in the epoch so far."""
        return self.rows

    def share(self) -> float:
        """Return this worker's share of all rows in the epoch."""
        total = all_sum(self._collective, [float(self.rows)])[0]
        return self.rows / total if total else 0.0

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.rows, self._steps_taken = epoch, 0, 0
        if not self.is_endless:  # it begins again; batches that were read ahead are dropped
            self._read.clear()
            self._first = None
            self.arrivals.clear()

    def count_steps(self, steps: int) -> None:
        """Count the rows in the steps that are done."""
        for _ in range(steps - self._steps_taken):
            self._last_rows = self._read.popleft()
            self.rows += self._last_rows
        self._steps_taken = max(steps, self._steps_taken)

    def read_step(self, step: int) -> tuple[Mapping[str, Any], int]:
        """Return the first batch of the epoch, the only one that is stored."""
        return flatten(self._first), 0

    def resume(self, first_epoch: int) -> None:
        """Do nothing: a pipeline does not depend on the first epoch."""

    def dataset(self, skip: int = 0) -> Any:
        """Return the local batches of one epoch, or of all if endless; steps cannot be skipped."""
        nothing = tf.data.Dataset.from_tensors(self._make_empty()).repeat()
        count = tf.autograph.experimental.do_not_convert(self._count)
        if self.is_endless:
            return self._data.repeat().concatenate(nothing).map(count)
        data = self._data.concatenate(nothing).take(self.steps)
        data = data.apply(tf.data.experimental.assert_cardinality(self.steps))
        return data.map(count)

    def _count(self, *parts: Any) -> Any:
        # tf.data passes the items of a tuple one by one.
        element = parts if isinstance(self._data.element_spec, tuple) else parts[0]

        def note(rows: Any) -> Any:
            self._read.append(int(rows))
            self.arrivals.note(1)
            return self._first is None

        def store(*leaves: Any) -> Any:
            copies = [np.array(leaf) for leaf in leaves]
            self._first = tf.nest.pack_sequence_as(element, copies)
            return False

        leaves = tf.nest.flatten(element)
        rows = count_rows(element)
        is_first = tf.numpy_function(note, [rows], tf.bool, stateful=True)
        is_first.set_shape([])
        copy = partial(tf.numpy_function, store, leaves, tf.bool, stateful=True)
        stored = tf.cond(is_first, copy, lambda: False)
        with tf.control_dependencies([stored]):
            return tf.nest.map_structure(tf.identity, element)

    def _make_empty(self) -> Any:
        def empty(spec: Any) -> Any:
            return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)

        return tf.nest.map_structure(empty, self._data.element_spec)


Batches = RowBatches | PipelineBatches
