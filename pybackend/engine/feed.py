"""Feeds one worker's rows to Keras: local batches of the epoch's order, cut as in `sharding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.data.arrays import Columns, rows_of, structure
from pybackend.data.sharding import bounds, order, order_of_all, steps_per_epoch
from pybackend.errors import InputError
from pybackend.job import Shuffle


class Feed:
    """A worker's shard as a ``tf.data.Dataset`` of one epoch.

    Set ``epoch`` before each epoch: the order of the rows depends on it.

    Parameters
    ----------
    columns
        The worker's rows; with ``shuffle="global"`` those of all workers.
    counts
        Rows that every worker visits in an epoch, by rank.
    shuffle
        ``"shard"`` (or True): a new order of the worker's rows in each epoch; ``"global"``: the
        workers share out a new order of all rows; False: as they come.
    limit
        Largest number of steps per epoch, or None for all rows.

    Attributes
    ----------
    rows
        Rows that this worker visits in an epoch.
    steps
        Steps of an epoch.
    total_rows
        Rows of the global batch by step; int64 array of shape (steps,).
    """

    def __init__(
        self,
        columns: Columns,
        counts: Sequence[int],
        rank: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: Shuffle = False,
        limit: int | None = None,
    ) -> None:
        self.counts = list(counts)
        self.rows = counts[rank]
        self.epoch = 0
        full = steps_per_epoch(counts, batch_size)
        if limit is not None and limit > full:
            raise InputError(
                f"`steps_per_epoch` is {limit}, but {sum(counts)} rows on {len(counts)} workers "
                f"give {full} steps of {batch_size} rows per worker"
            )
        self.steps = full if limit is None else limit
        rows = [np.diff(bounds(count, full)[: self.steps + 1]) for count in counts]
        self._rows_by_rank = np.stack(rows)
        self.total_rows = self._rows_by_rank.sum(axis=0)
        self.may_be_empty = bool((self._rows_by_rank == 0).any())
        self._edges = bounds(self.rows, full)[: self.steps + 1]
        if shuffle == "global":
            everyone = rows_of(columns)
            self._order = lambda: order_of_all(everyone, seed, self.epoch)[rank :: len(counts)]
        else:
            self._order = lambda: order(self.rows, seed, self.epoch, rank, bool(shuffle))
        # A copy in TensorFlow's memory: gathering rows then needs no Python at all.
        self._tensors = {key: tf.constant(array) for key, array in columns.items()}

    def with_all_classes(self, class_weight: dict[int, float]) -> dict[int, float]:
        """Weight 1 for the classes that are not named: Keras looks each one up."""
        labels = self._tensors["y"].numpy()
        last = max(class_weight)
        if labels.ndim > 1 and labels.shape[-1] > 1:  # one-hot
            last = max(last, labels.shape[-1] - 1)
        elif labels.size:
            last = max(last, int(labels.max()))
        return {number: class_weight.get(number, 1.0) for number in range(last + 1)}

    def rows_at(self, step: int) -> Any:
        """Rows of every rank's local batch at a step; int64 array of shape (world size,)."""
        return self._rows_by_rank[:, step]

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
