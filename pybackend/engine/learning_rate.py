"""Steps with a learning rate that is scaled to the number of workers: see `ScaleLearningRate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.engine.overrides import override
from pybackend.engine.steps import has_keras_train_step
from pybackend.job.learning_rate import ScaleLearningRate


class ScaledSteps(keras.callbacks.Callback):
    """Multiplies the learning rate while the optimizer takes a step, and no longer.

    So callbacks, checkpoints and the trained model see the rate that the user's optimizer has, and
    callbacks that change it do so. As one of the last callbacks it puts the rate of an epoch's last
    step into the history.

    Parameters
    ----------
    steps
        Steps of an epoch.
    """

    def __init__(self, scale: ScaleLearningRate, workers: int, steps: int, model: Any) -> None:
        super().__init__()
        self._scale = scale
        self._workers = workers
        self._steps = steps
        self._optimizer = model.optimizer
        # Several steps may run between two calls of a callback. A train_step of the user's own may
        # call the optimizer as often as it likes, and each time has the rate of the first.
        self._advances = int(has_keras_train_step(model))
        self._multiples = tf.Variable(np.ones(steps, "float32"), trainable=False)
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._rate = tf.Variable(0.0, dtype=self._optimizer.learning_rate.dtype, trainable=False)

    @property
    def variables(self) -> list[Any]:
        """What a step reads and changes."""
        return [self._multiples, self._step, self._rate]

    @contextmanager
    def install(self) -> Iterator[None]:
        """Act on the optimizer's steps while the context lasts."""
        with override(self._optimizer, "apply", self._wrap(self._optimizer.apply)):
            yield

    def _wrap(self, apply: Any) -> Any:
        def scaled(*args: Any, **options: Any) -> Any:
            given = self._optimizer.learning_rate
            unscaled = tf.identity(given.value)
            # The last of several steps at once may lie beyond the epoch's end.
            place = tf.minimum(self._step, self._steps - 1)
            rate = unscaled * tf.cast(tf.gather(self._multiples, place), unscaled.dtype)
            given.assign(rate)
            applied = apply(*args, **options)
            given.assign(unscaled)
            self._rate.assign(rate)
            self._step.assign_add(self._advances)
            return applied

        return scaled

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        done = [epoch + step / self._steps for step in range(self._steps)]
        multiples = [self._scale.multiple(self._workers, epochs) for epochs in done]
        self._multiples.assign(np.array(multiples, "float32"))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step.assign(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self._rate.numpy())
