"""Gradient exchange inside TensorFlow's graph, using its own collectives."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pybackend.core.collective.tensorflow import GraphReduce
from pybackend.core.engine.flat import Layout


class GraphAgreement:
    """`flat.StopAgreement` in variables that the graph reads and writes."""

    def __init__(self) -> None:
        self.requested = tf.Variable(False, trainable=False)
        self.preempted = tf.Variable(False, trainable=False)
        self.agreed = tf.Variable(False, trainable=False)

    @property
    def is_requested(self) -> bool:
        """True if this worker requests that training stop."""
        return bool(self.requested.numpy())

    @is_requested.setter
    def is_requested(self, value: bool) -> None:
        self.requested.assign(value)

    @property
    def is_preempted(self) -> bool:
        """True if this worker was preempted and requests that all leave."""
        return bool(self.preempted.numpy())

    @is_preempted.setter
    def is_preempted(self, value: bool) -> None:
        self.preempted.assign(value)

    @property
    def is_agreed(self) -> bool:
        """True if some worker requests either; all workers learn this at the same step."""
        return bool(self.agreed.numpy())


class GraphExchange:
    """Average of gradients like `flat.FlatExchange`, without leaving the graph."""

    def __init__(self, reduce: GraphReduce, bucket_bytes: float) -> None:
        self._reduce = reduce
        self._bucket_bytes = bucket_bytes
        self.agreement = GraphAgreement()

    def average(self, tensors: list[Any], weight: Any) -> list[Any]:
        """Return the mean of each tensor over the total weight of all workers."""
        layout = Layout.of([tuple(t.shape) for t in tensors], weight.dtype.size, self._bucket_bytes)
        wants_end = tf.logical_or(self.agreement.requested, self.agreement.preempted)
        tail = tf.stack([weight, tf.cast(wants_end, weight.dtype)])
        # First, so that every bucket can be divided as it arrives.
        total, stop = tf.unstack(self._reduce.all_reduce(tail))
        # If no worker has rows, the means are zeros; this avoids a division by zero.
        total = tf.where(total > 0, total, tf.ones_like(total))
        self.agreement.agreed.assign(tf.logical_or(self.agreement.agreed, stop > 0))
        means = list(tensors)
        for numbers in layout.buckets:
            if not numbers:
                continue
            flat = tf.concat([tf.reshape(tensors[n], [-1]) for n in numbers], 0)
            summed = self._reduce.all_reduce(flat * weight) / total
            sizes = [int(tensors[n].shape.num_elements()) for n in numbers]
            for n, part in zip(numbers, tf.split(summed, sizes), strict=True):
                means[n] = tf.reshape(part, tensors[n].shape)
        return means
