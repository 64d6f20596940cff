"""Models whose loss leaves out rows or time steps, because of a mask or an ignored class.

Such a loss is a mean over valid steps, not over rows.
"""

from __future__ import annotations

from typing import Any

import keras

from pybackend.errors import InputError
from pybackend.model.layers import find_layers, flatten


def has_masked_loss(model: Any) -> bool:
    """Return whether a mask or an ignored class may exclude rows or time steps from the loss."""
    if find_ignored_class(model) is not None:
        return True
    return any(map(_makes_mask, find_layers(model))) and _keeps_time_axis(model)


def find_ignored_class(model: Any) -> Any:
    """Return the class that a loss of the model ignores, or None."""
    ignored = [getattr(loss, "ignore_class", None) for loss in flatten(model.loss)]
    return next((number for number in ignored if number is not None), None)


def check_masks(model: Any) -> None:
    """Reject masks combined with several losses or other means: each would need its own weights.

    Raises
    ------
    InputError
        Names the model or the layer.
    """
    if not has_masked_loss(model):
        return
    outputs = _find_outputs(model)
    if outputs is not None and len(outputs) > 1:
        raise InputError(
            f"the model {model.name!r} leaves time steps or a class out of the loss and has "
            f"{len(outputs)} outputs: each loss would be a mean over a different number of "
            "steps. Give `exchange` the option loss_over='global batch', or use one output, or "
            "sample weights in place of the mask"
        )
    for layer in find_layers(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            raise InputError(
                f"layer {layer.name!r} has an activity regularizer, a mean over rows, in a model "
                "whose masks make the loss a mean over time steps: give `exchange` the option "
                "loss_over='global batch', or use one without the other"
            )


def _makes_mask(layer: Any) -> bool:
    is_custom = not type(layer).compute_mask.__module__.startswith("keras.")
    is_masking = isinstance(layer, keras.layers.Masking)
    return is_custom or is_masking or getattr(layer, "mask_zero", False)


def _keeps_time_axis(model: Any) -> bool:
    outputs = _find_outputs(model)
    return outputs is None or any(len(output.shape) >= 3 for output in outputs)


def _find_outputs(model: Any) -> Any:
    try:
        return model.outputs or []
    except AttributeError:  # a subclassed model: its outputs are not known before it runs
        return None
