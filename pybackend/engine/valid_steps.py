"""Count of the unmasked time steps of a loss: the number that a worker's mean loss divides by."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from pybackend.errors import InputError
from pybackend.model.masks import find_ignored_class

# Too small to change a sum of counts, but a completely masked batch has a mean, too.
_NEXT_TO_NOTHING = 1e-9


class _UnmaskedCount(keras.losses.Loss):
    """Number of unmasked losses: Keras applies the mask, and this loss adds up ones."""

    def __init__(self, ignored_class: Any) -> None:
        super().__init__(reduction="sum", name="valid_steps")
        self._ignored_class = ignored_class

    def call(self, y_true: Any, y_pred: Any) -> Any:
        ones = keras.ops.ones_like(y_pred[..., 0])
        if self._ignored_class is None:
            return ones
        labels = keras.ops.reshape(y_true, keras.ops.shape(ones))
        return ones * keras.ops.cast(labels != self._ignored_class, ones.dtype)


class ValidStepCounter:
    """Counter of the valid steps in a batch, from calls of a model's ``compute_loss``."""

    def __init__(self, model: Any) -> None:
        self._count = _UnmaskedCount(find_ignored_class(model))
        self._valid: Any = None
        self.loss: Any = 0.0
        """The batch's mean loss, as a tensor of the step that is being traced."""

    def watch(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compute_loss`` of a model, so that the valid steps of a call are counted."""
        signature = inspect.signature(compute_loss)

        def watched(*args: Any, **options: Any) -> Any:
            arguments = signature.bind(*args, **options).arguments
            y_pred = arguments.get("y_pred")
            if isinstance(y_pred, (dict, list, tuple)) and len(y_pred) > 1:
                raise InputError(
                    "the model masks time steps and has several outputs: use one output, or "
                    "sample weights in place of the mask"
                )
            self.loss = compute_loss(*args, **options)
            y = arguments.get("y")
            self._valid = self._count(y_pred if y is None else y, y_pred)
            return self.loss

        # Keras checks whether there is a parameter `training`.
        watched.__signature__ = signature  # type: ignore[attr-defined]
        return watched

    def weight(self, rows: Any) -> Any:
        """Return the weight of this worker's gradients in the step that is being traced."""
        rows = tf.cast(rows, tf.float32)
        if self._valid is None:  # a custom train_step that computes its loss itself
            return rows
        return tf.cast(self._valid, tf.float32) + _NEXT_TO_NOTHING * rows
