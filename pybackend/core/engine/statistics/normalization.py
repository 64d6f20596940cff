"""Batch normalization over the rows of the global batch: `BatchNormalization(synchronized=True)`.

The sums and the counts of all workers give one mean and one variance (Peng et al., "MegDet: a large
mini-batch object detector", 2018). In the backward pass, every worker's gradient with respect to
them reaches the inputs of all workers: with weights n_w of the workers' gradients, g_w becomes the
sum of n_v g_v over the workers v, divided by n_w, since the mean over workers will multiply it by
n_w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import ops

from pybackend.core.collective import Collective
from pybackend.core.engine.step_changes import StepCalls, override, override_each
from pybackend.core.errors import InputError
from pybackend.core.words import setting

Array = npt.NDArray[Any]


@dataclass(eq=False)
class GlobalStatistics:
    """Normalization over the rows of all workers, in layers with ``synchronized=True``.

    This applies only to steps traced while `active` is in effect. ``weigh`` returns a scalar, the
    weight of this worker's gradients in the step being traced; known in the backward pass.
    """

    layers: Sequence[Any]
    collective: Collective
    calls: StepCalls
    weigh: Callable[[], Any]
    is_active: bool = False

    def install(self) -> AbstractContextManager[None]:
        return override_each(self.layers, "call", self._watch)

    def active(self) -> AbstractContextManager[None]:
        return override(self, "is_active", True)

    def _watch(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            if not (self.is_active and training and layer.trainable):
                return call(inputs, training=training, mask=mask)
            return self._normalize(layer, inputs, mask)

        return watched

    def _normalize(self, layer: Any, inputs: Any, mask: Any) -> Any:
        # Half precision overflows in squares.
        values = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        mean, variance = self._compute_moments(layer, values, mask)
        _move_statistics(layer, mean, variance)
        normalized = ops.batch_normalization(
            x=values,
            mean=mean,
            variance=variance,
            axis=layer.axis,
            offset=ops.cast(layer.beta, values.dtype) if layer.center else None,
            scale=ops.cast(layer.gamma, values.dtype) if layer.scale else None,
            epsilon=layer.epsilon,
        )
        return ops.cast(normalized, layer.compute_dtype)

    def _compute_moments(self, layer: Any, values: Any, mask: Any) -> tuple[Any, Any]:
        """Return the mean and variance of each channel over all workers."""
        rank = len(values.shape)
        axis = layer.axis % rank
        others = [number for number in range(rank) if number != axis]
        channels = int(values.shape[axis])
        shape = [channels if number == axis else 1 for number in range(rank)]
        if mask is None:
            counted, tiny = values, 0.0
            ones = ops.ones([channels], values.dtype)
            count = ops.cast(tf.size(values) / channels, values.dtype) * ones
        else:
            is_counted = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(values))
            is_counted = ops.cast(is_counted, values.dtype)
            counted, tiny = values * is_counted, keras.config.epsilon()  # as in Keras
            count = ops.sum(is_counted, others)
        self.calls.record(lambda: self._join(layer, channels, values.dtype, tiny))
        count = ops.cast(count, values.dtype)
        sums = self._sum(ops.concatenate([ops.sum(counted, others), ops.stop_gradient(count)]))
        total = ops.stop_gradient(sums[channels:]) + tiny
        mean = sums[:channels] / total
        off = values - ops.reshape(mean, shape)
        off = off if mask is None else off * is_counted
        return mean, self._sum(ops.sum(ops.square(off), others)) / total

    def _join(self, layer: Any, channels: int, dtype: Any, tiny: float) -> None:
        """Take part in the forward pass of a layer, on a worker without rows."""
        sums = self._add_up(tf.zeros([2 * channels], dtype))
        total = sums[channels:] + tiny
        variance = self._add_up(tf.zeros([channels], dtype)) / total
        _move_statistics(layer, sums[:channels] / total, variance)

    def _sum(self, values: Any) -> Any:
        return tf.custom_gradient(lambda own: (self._add_up(own), self._share_out))(values)

    def _share_out(self, gradient: Any) -> Any:
        """Return the gradient of a sum, which is a sum over the workers, too."""

        def share(own: Any) -> Any:
            weight = tf.cast(self.weigh(), own.dtype)
            return self._add_up(own * weight) / weight, _refuse_second

        self.calls.record(lambda: self._add_up(tf.zeros_like(gradient)))
        return tf.custom_gradient(share)(gradient)

    def _add_up(self, values: Any) -> Any:
        def reduce(own: Array) -> Array:
            total = np.array(own)
            self.collective.all_reduce(total)
            return total

        return self.calls.call(reduce, [values], [tf.TensorSpec(values.shape, values.dtype)])[0]


def _refuse_second(upstream: Any) -> Any:
    raise InputError(
        "a train_step takes the gradient of a gradient (a gradient penalty) through a layer with "
        f"{setting(synchronized=True)}, which the workers cannot compute together: use "
        f"{setting(synchronized=False)}, or a normalization of each row, such as LayerNormalization"
    )


def _move_statistics(layer: Any, mean: Any, variance: Any) -> None:
    for moving, now in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        before = ops.cast(moving, now.dtype)
        moving.assign(before * layer.momentum + now * (1.0 - layer.momentum))
