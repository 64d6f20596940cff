"""Feed the batches of a custom pipeline: of any size, for any number of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_sum
from pybackend.core.data.arrays import flatten
from pybackend.core.data.rows import ArrayRows
from pybackend.core.engine.step_clock import Arrivals
from pybackend.core.errors import InputError


def count_rows(data: Any) -> Any:
    """Return a batch's number of rows as a scalar int32 tensor; counts labels if there are any."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    return tf.shape(tf.nest.flatten(x if y is None else y)[0])[0]


class PipelineFeed:
    """Custom ``tf.data.Dataset`` as local batches, in place of a `Feed`.

    An epoch has ``limit`` steps, or else one step for each batch of the longest data set of any
    worker. If a worker's own batches end earlier, batches without rows follow. If a data set's
    length is unknown, it is read once to count its batches, unless there is a ``limit``.

    Parameters
    ----------
    data
        Data set of ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
    limit
        Steps per epoch; required if any worker's data set is endless, which then continues from
        epoch to epoch.

    Attributes
    ----------
    sample
        Rows of the first batch.
    is_uneven
        True if arrays of a batch have different numbers of rows; those of ``y`` are counted.
    arrivals
        Times at which the batches of this epoch were ready.
    total_rows
        None: no worker knows how many rows the others will have in a step.
    taken
        0: no other workers took the first steps of an epoch.
    """

    total_rows = None
    taken = 0
    is_sharded = False

    @property
    def is_endless(self) -> bool:
        """True if the batches continue from epoch to epoch."""
        return self._is_endless

    def __init__(self, data: Any, collective: Collective, limit: int | None) -> None:
        self.epoch = 0
        self.rows = 0
        self._collective = collective
        self._data = data
        # Rows of the batches that TensorFlow has read, ahead of the training.
        self._read: deque[int] = deque()
        self._steps_taken = 0
        self._last_rows = 0
        self._first: Any = None
        self.arrivals = Arrivals()
        own = int(data.cardinality())
        unknown = own == tf.data.UNKNOWN_CARDINALITY
        # It continues from epoch to epoch, as in Keras.
        self._is_endless = own == tf.data.INFINITE_CARDINALITY or (unknown and limit is not None)
        if unknown and limit is None:
            own = int(data.reduce(np.int64(0), lambda count, _: count + 1))
        first = next(iter(data.take(1).as_numpy_iterator()), None)
        leaves = flatten(self._make_empty_arrays() if first is None else first)
        uneven = len({len(leaf) for leaf in leaves.values()}) > 1
        everyone = collective.all_gather(np.array([own, unknown, uneven], np.int64))
        batches = [int(count) for count, _, _ in everyone]
        self.steps = self._count_epoch_steps(batches, limit)
        # A pipeline that was read once need not return the same number of batches again.
        is_sure = not any(unknown for _, unknown, _ in everyone)
        self.may_be_empty = not is_sure or any(0 <= count < self.steps for count in batches)
        self.begins_empty = self.may_be_empty
        self.is_uneven = any(uneven for _, _, uneven in everyone)
        if self.is_uneven:  # rows of different arrays do not correspond
            leaves = {key: leaf[:0] for key, leaf in leaves.items()}
        self.sample = ArrayRows(leaves)

    @staticmethod
    def _count_epoch_steps(batches: list[int], limit: int | None) -> int:
        """Return the steps per epoch; negative numbers of batches mean endless or unknown."""
        endless = [rank for rank, count in enumerate(batches) if count < 0]
        if limit is None and endless:
            raise InputError(
                f"the `data` function returns infinite data on worker {endless[0]}: pass "
                "`steps_per_epoch`"
            )
        if not endless and max(batches) == 0:
            raise InputError("the `data` function returned no batches on any worker")
        if limit is not None and not endless and limit > max(batches):
            raise InputError(
                f"`steps_per_epoch` is {limit}, but the `data` function returns at "
                f"most {max(batches)} batches on a worker"
            )
        return limit or max(batches)

    @property
    def fit_options(self) -> dict[str, Any]:
        """Arguments of ``fit`` that this data set needs."""
        return {"steps_per_epoch": self.steps} if self._is_endless else {}

    @property
    def most_steps(self) -> int:
        """Largest number of steps of an epoch."""
        return self.steps

    def rows_at(self, step: int) -> Any:
        """Return the size of every rank's local batch at the last step, in shape (world size,).

        Raises
        ------
        InputError
            No rank has rows: the pipeline returned fewer batches than the first time, or fewer than
            `steps_per_epoch` requires.
        """
        own = np.array([self._last_rows], np.int64)
        rows = np.concatenate(self._collective.all_gather(own))
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
        """Start counting the rows of an epoch."""
        self.epoch, self.rows, self._steps_taken = epoch, 0, 0
        if not self._is_endless:  # it begins again; batches that were read ahead are dropped
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
        if self._is_endless:
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
        stored = tf.cond(
            is_first,
            lambda: tf.numpy_function(store, leaves, tf.bool, stateful=True),
            lambda: False,
        )
        with tf.control_dependencies([stored]):
            return tf.nest.map_structure(tf.identity, element)

    def _make_empty_arrays(self) -> Any:
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self._make_empty())

    def _make_empty(self) -> Any:
        """Return a batch without rows."""

        def empty(spec: Any) -> Any:
            return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)

        return tf.nest.map_structure(empty, self._data.element_spec)
