"""Feeds one worker's rows to Keras: local batches of the epoch's order, cut as in `sharding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.data.arrays import Columns, rows_of, structure
from pybackend.data.sharding import bounds, order, steps_per_epoch
from pybackend.errors import InputError


class Feed:
    """A worker's shard as a ``tf.data.Dataset`` of one epoch.

    Set ``epoch`` before each epoch: the order of the rows depends on it.

    Parameters
    ----------
    columns
        The worker's rows.
    counts
        Rows of every worker, by rank.
    limit
        Largest number of steps per epoch, or None for all rows.
    """

    def __init__(
        self,
        columns: Columns,
        counts: Sequence[int],
        rank: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = False,
        limit: int | None = None,
    ) -> None:
        self.rows = rows_of(columns)
        self.epoch = 0
        full = steps_per_epoch(counts, batch_size)
        if limit is not None and limit > full:
            raise InputError(
                f"`steps_per_epoch` is {limit}, but {sum(counts)} rows on {len(counts)} workers "
                f"give {full} steps of {batch_size} rows per worker"
            )
        self.steps = full if limit is None else limit
        edges = bounds(self.rows, full)[: self.steps + 1]
        self.may_be_empty = bool((np.diff(edges) == 0).any())
        self._edges = edges
        self._order = lambda: order(self.rows, seed, self.epoch, rank, shuffle)
        # A copy in TensorFlow's memory: gathering rows then needs no Python at all.
        self._tensors = {key: tf.constant(array) for key, array in columns.items()}

    def dataset(self) -> Any:
        """The local batches of one epoch; Keras iterates it anew for each."""
        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        options.autotune.enabled = False
        epoch = tf.data.Dataset.range(1).flat_map(self._batches)
        epoch = epoch.apply(tf.data.experimental.assert_cardinality(self.steps))
        return epoch.prefetch(2).with_options(options)

    def _batches(self, _: Any) -> Any:
        visited = tf.numpy_function(self._order, [], tf.int64, stateful=True)
        visited.set_shape([self.rows])
        starts, ends = self._edges[:-1], self._edges[1:]

        def batch(start: Any, end: Any) -> Any:
            rows = visited[start:end]
            return structure({key: tf.gather(t, rows) for key, t in self._tensors.items()})

        return tf.data.Dataset.from_tensor_slices((starts, ends)).map(batch)


def shaped_for(columns: Columns, model: Any) -> Columns:
    """Give flat rows (of a DataFrame, say) the shape of the model's one input.

    ``(rows, 784)`` becomes ``(rows, 28, 28, 1)`` for a model of that input; anything that fits
    already, or cannot fit, is left to Keras.
    """
    try:
        expected = tuple(model.input_shape)[1:]
    except (AttributeError, TypeError):  # not built, or several inputs
        return columns
    x = columns.get("x")
    if x is None or x.shape[1:] == expected or not all(isinstance(n, int) for n in expected):
        return columns
    if int(np.prod(x.shape[1:])) != int(np.prod(expected)):
        raise InputError(
            f"the rows have shape {x.shape[1:]}, but the model's input has shape {expected}"
        )
    return {**columns, "x": x.reshape((len(x), *expected))}
