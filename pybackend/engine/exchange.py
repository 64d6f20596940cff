"""Averages the gradients of all workers inside the optimizer.

Each worker's mean gradient is weighted by the rows it was computed from; the rows travel in the
same buffer, and the sum is divided by their total. That is the mean gradient over the global
batch, whatever the split. Clipping, weight decay and momenta act after it, inside the optimizer,
as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.collective import Collective


class GradientExchange:
    """Couples one compiled model to a collective for the duration of a ``fit``.

    The optimizer *instance* gets a new ``apply``, not its class, so that saved models know
    nothing of it. Local batches may be empty (``may_be_empty``): such a step skips the model and
    adds nothing to the sum.
    """

    def __init__(self, model: Any, collective: Collective, may_be_empty: bool) -> None:
        self._model = model
        self._collective = collective
        self._may_be_empty = may_be_empty
        self._rows: Any = None
        self._has_gradient: list[bool] = []
        self.error: BaseException | None = None
        """What went wrong in an exchange: TensorFlow passes on the text alone."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Exchange gradients while the context lasts; the model is as it was afterwards."""
        model, optimizer = self._model, self._model.optimizer
        train_step, apply = model.train_step, optimizer.apply
        optimizer.apply = self._averaging(apply)
        model.train_step = self._counting(train_step)
        # A model that was fitted before keeps the function traced then, without the exchange.
        model.make_train_function(force=True)
        try:
            yield
        finally:
            del optimizer.apply
            del model.train_step
            model.make_train_function(force=True)

    def _counting(self, train_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counting_train_step(data: Any) -> Any:
            self._rows = tf.shape(tf.nest.flatten(data)[0])[0]
            if not self._may_be_empty:
                return train_step(data)
            return tf.cond(self._rows > 0, lambda: train_step(data), self._empty_step)

        return counting_train_step

    def _empty_step(self) -> Any:
        model = self._model
        variables = model.trainable_variables
        gradients = [
            tf.zeros(v.shape, v.dtype) if present else None
            for v, present in zip(variables, self._has_gradient, strict=True)
        ]
        model.optimizer.apply(gradients, variables)
        return model.get_metrics_result()

    def _averaging(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def averaging_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            self._has_gradient = [gradient is not None for gradient in grads]
            return apply(self._averaged(list(grads)), trainable_variables)

        return averaging_apply

    def _averaged(self, gradients: list[Any]) -> list[Any]:
        """Mean gradients over the global batch, all in one exchange."""
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if not places:
            return gradients
        # Sparse gradients (IndexedSlices) become dense here.
        dense = [tf.convert_to_tensor(gradients[place]) for place in places]
        # Half precision cannot hold a sum weighted by rows: it is exchanged as float32.
        wide = tf.float64 if any(g.dtype == tf.float64 for g in dense) else tf.float32
        mean = self._mean([tf.cast(tf.reshape(g, [-1]), wide) for g in dense], wide)
        parts = tf.split(mean, [int(np.prod(g.shape, dtype=np.int64)) for g in dense])
        for place, gradient, part in zip(places, dense, parts, strict=True):
            gradients[place] = tf.cast(tf.reshape(part, gradient.shape), gradient.dtype)
        return gradients

    def _mean(self, flat: list[Any], dtype: Any) -> Any:
        rows = tf.cast(self._rows, dtype)
        buffer = tf.concat([tf.concat(flat, 0) * rows, [rows]], 0)
        total = tf.numpy_function(self._all_reduce, [buffer], dtype, stateful=True)
        total.set_shape(buffer.shape)
        return total[:-1] / total[-1]

    def _all_reduce(self, buffer: Any) -> Any:
        try:
            summed = np.array(buffer)  # TensorFlow's own memory must not be written to
            self._collective.all_reduce(summed)
            return summed
        except BaseException as error:
            self.error = error
            raise
