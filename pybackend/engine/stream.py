"""Feeds what the user's own pipeline gives: local batches of any sizes, on any number of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.collective import Collective, all_sum
from pybackend.data.arrays import leaves_of
from pybackend.data.rows import ArrayRows
from pybackend.errors import InputError


class StreamFeed:
    """A ``tf.data.Dataset`` of the user's as local batches; stands where `Feed` stands otherwise.

    An epoch has as many steps as the longest worker's data set has batches, or ``limit``. Batches
    without rows follow where a worker's own end earlier.

    Parameters
    ----------
    data
        Of ``(x, y)`` or ``(x, y, sample_weight)``.
    limit
        Steps per epoch; needed where any worker's data set is endless, which then goes on from
        epoch to epoch.

    Attributes
    ----------
    sample
        Rows of the first batch.
    total_rows
        None: no worker knows how many rows the others will bring to a step.
    """

    total_rows = None

    def __init__(self, data: Any, collective: Collective, limit: int | None) -> None:
        self.epoch = 0
        self.rows = 0
        self._collective = collective
        self._data = data
        self._last_rows = 0
        own = int(data.cardinality())
        self._is_endless = own == tf.data.INFINITE_CARDINALITY
        if own == tf.data.UNKNOWN_CARDINALITY:
            own = int(data.reduce(np.int64(0), lambda count, _: count + 1))
        batches = [int(part[0]) for part in collective.all_gather(np.array([own], np.int64))]
        endless = [rank for rank, count in enumerate(batches) if count < 0]
        if limit is None and endless:
            raise InputError(
                f"the function `data` returns endless data on worker {endless[0]}: give "
                "`steps_per_epoch`"
            )
        if max(batches) == 0:
            raise InputError("the function `data` returned no batch on any worker")
        self.steps = limit or max(batches)
        if limit is not None and not endless and limit > max(batches):
            raise InputError(
                f"`steps_per_epoch` is {limit}, but the function `data` gives at most "
                f"{max(batches)} batches on a worker"
            )
        self.may_be_empty = any(0 <= count < self.steps for count in batches)
        first = next(iter(data.take(1).as_numpy_iterator()), None)
        self.sample = ArrayRows(leaves_of(first if first is not None else self._nothing()))

    @property
    def fit_options(self) -> dict[str, Any]:
        """Arguments of ``fit`` that this data set needs."""
        return {"steps_per_epoch": self.steps} if self._is_endless else {}

    def rows_at(self, step: int) -> Any:
        """Rows of every rank's local batch at the step just taken; shape (world size,)."""
        own = np.array([self._last_rows], np.int64)
        return np.concatenate(self._collective.all_gather(own))

    def share(self) -> float:
        """This worker's part of all rows of the epoch."""
        total = all_sum(self._collective, [float(self.rows)])[0]
        return self.rows / total if total else 0.0

    def begin_epoch(self, epoch: int) -> None:
        """Count the rows of an epoch from here."""
        self.epoch, self.rows = epoch, 0

    def dataset(self) -> Any:
        """The local batches of one epoch, or of all where they do not end."""
        data = self._data
        if not self._is_endless:
            nothing = tf.data.Dataset.from_tensors(self._nothing()).repeat(self.steps)
            data = data.concatenate(nothing).take(self.steps)
            data = data.apply(tf.data.experimental.assert_cardinality(self.steps))
        return data.map(self._counted)

    def _counted(self, *parts: Any) -> Any:
        def count(rows: Any) -> Any:
            self._last_rows = int(rows)
            self.rows += int(rows)
            return rows

        first = tf.nest.flatten(parts)[0]
        counted = tf.numpy_function(count, [tf.shape(first)[0]], tf.int32, stateful=True)
        with tf.control_dependencies([counted]):
            return tf.nest.map_structure(tf.identity, parts)

    def _nothing(self) -> Any:
        """A batch without rows."""

        def empty(spec: Any) -> Any:
            return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)

        return tf.nest.map_structure(empty, self._data.element_spec)
