"""Losses over masked time steps: means over the steps that are valid, not over rows.

A worker's mean then weighs as much as the number of valid steps in its batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from pybackend.errors import InputError
from pybackend.model.layers import all_layers, flat

# So small that it changes no sum of counts, but a batch that is masked whole has a mean, too.
_NEXT_TO_NOTHING = 1e-9


class _Counted(keras.losses.Loss):
    """The number of losses that a mask leaves: Keras applies the mask, this one adds up ones."""

    def __init__(self, ignored_class: Any) -> None:
        super().__init__(reduction="sum", name="valid_steps")
        self._ignored_class = ignored_class

    def call(self, y_true: Any, y_pred: Any) -> Any:
        ones = keras.ops.ones_like(y_pred[..., 0])
        if self._ignored_class is None:
            return ones
        labels = keras.ops.reshape(y_true, keras.ops.shape(ones))
        return ones * keras.ops.cast(labels != self._ignored_class, ones.dtype)


class ValidCount:
    """Watches a model's ``compute_loss`` for the number of valid steps in a batch."""

    def __init__(self, model: Any) -> None:
        self._count = _Counted(_ignored_class(model))
        self._valid: Any = None
        self.loss: Any = 0.0
        """The batch's mean loss, as tensor of the step that is being traced."""

    def watching(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """``compute_loss`` of a model, watched."""
        signature = inspect.signature(compute_loss)

        def watched(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options).arguments
            if isinstance(given.get("y_pred"), (dict, list, tuple)) and len(given["y_pred"]) > 1:
                raise InputError(
                    "the model masks time steps and has several outputs: use one output, or "
                    "sample weights in place of the mask"
                )
            self.loss = compute_loss(*args, **options)
            self._valid = self._count(given.get("y"), given.get("y_pred"))
            return self.loss

        # Keras looks whether there is a parameter `training`.
        watched.__signature__ = signature  # type: ignore[attr-defined]
        return watched

    def weight(self, rows: Any) -> Any:
        """What this worker's gradients weigh in the step that is being traced."""
        rows = tf.cast(rows, tf.float32)
        if self._valid is None:  # a train_step of the user's own that computes its loss itself
            return rows
        return tf.cast(self._valid, tf.float32) + _NEXT_TO_NOTHING * rows


def masks_reach_the_loss(model: Any) -> bool:
    """Whether a mask, or a class that the loss ignores, may leave rows or time steps out of it."""
    if _ignored_class(model) is not None:
        return True
    return any(map(_masks, all_layers(model))) and _keeps_time_axis(model)


def _ignored_class(model: Any) -> Any:
    ignored = [getattr(loss, "ignore_class", None) for loss in flat(model.loss)]
    return next((number for number in ignored if number is not None), None)


def _masks(layer: Any) -> bool:
    is_own = not type(layer).compute_mask.__module__.startswith("keras.")
    return is_own or isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)


def check_masks(model: Any) -> None:
    """Refuse masks beside other losses or means, of which each would need weights of its own.

    Raises
    ------
    InputError
        Names the model or the layer.
    """
    if not masks_reach_the_loss(model):
        return
    outputs = _outputs(model)
    if outputs is not None and len(outputs) > 1:
        raise InputError(
            f"the model {model.name!r} leaves time steps or a class out of the loss and has "
            f"{len(outputs)} outputs: each loss would be a mean over another number of "
            "steps. Use one output, or sample weights in place of the mask"
        )
    for layer in all_layers(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            raise InputError(
                f"layer {layer.name!r} has an activity regularizer, a mean over rows, in a model "
                "whose masks make the loss a mean over time steps: use one without the other"
            )


def _keeps_time_axis(model: Any) -> bool:
    outputs = _outputs(model)
    return outputs is None or any(len(output.shape) >= 3 for output in outputs)


def _outputs(model: Any) -> Any:
    try:
        return model.outputs or []
    except AttributeError:  # a subclassed model: its outputs are not known before it runs
        return None
