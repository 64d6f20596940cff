"""Losses over masked time steps: means over the steps that are valid, not over rows.

A worker's mean then weighs as much as the number of valid steps in its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from pybackend.errors import InputError

# So small that it changes no sum of counts, but a batch that is masked whole has a mean, too.
_NEXT_TO_NOTHING = 1e-9


class _Counted(keras.losses.Loss):
    """The number of losses that a mask leaves: Keras applies the mask, this one adds up ones."""

    def __init__(self) -> None:
        super().__init__(reduction="sum", name="valid_steps")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.ones_like(y_pred[..., 0])


class ValidCount:
    """Watches a model's ``compute_loss`` for the number of valid steps in a batch."""

    def __init__(self) -> None:
        self._count = _Counted()
        self._valid: Any = None
        self.loss: Any = 0.0
        """The batch's mean loss, as tensor of the step that is being traced."""

    def watching(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """``compute_loss`` of a model, watched."""

        def watched(
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            if isinstance(y_pred, (dict, list, tuple)):
                raise InputError(
                    "the model masks time steps and has several outputs: use one output, or "
                    "sample weights in place of the mask"
                )
            loss = compute_loss(x, y, y_pred, sample_weight, training)
            self._valid = self._count(y, y_pred)
            self.loss = loss
            return loss

        return watched

    def weight(self, rows: Any) -> Any:
        """What this worker's gradients weigh in the step that is being traced."""
        return self._valid + _NEXT_TO_NOTHING * tf.cast(rows, self._valid.dtype)


def masks_reach_the_loss(model: Any) -> bool:
    """Whether a mask may leave time steps out of the loss."""
    masking = any(
        isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
        for layer in all_layers(model)
    )
    return masking and _keeps_time_axis(model)


def check_masks(model: Any) -> None:
    """Refuse masks in a model with several losses, of which each would need weights of its own.

    Raises
    ------
    InputError
        Names the model.
    """
    outputs = _outputs(model)
    if masks_reach_the_loss(model) and outputs is not None and len(outputs) > 1:
        raise InputError(
            f"the model {model.name!r} masks time steps and has {len(outputs)} outputs: each loss "
            "would be a mean over another number of steps. Use one output, or sample weights in "
            "place of the mask"
        )


def all_layers(model: Any) -> Iterable[Any]:
    """Layers of a model and of the models inside it."""
    for layer in model.layers:
        yield layer
        if hasattr(layer, "layers"):
            yield from all_layers(layer)


def _keeps_time_axis(model: Any) -> bool:
    outputs = _outputs(model)
    return outputs is None or any(len(output.shape) >= 3 for output in outputs)


def _outputs(model: Any) -> Any:
    try:
        return model.outputs or []
    except AttributeError:  # a subclassed model: its outputs are not known before it runs
        return None
