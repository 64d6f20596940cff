"""Places of an image or a sequence in the windows of a convolution or a pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pybackend.sql.graph import Array

Shape = tuple[int, ...]


def find_windows(spots: Shape, layer: Any, sizes: Sequence[int]) -> tuple[Shape, Array]:
    """Return the windows of a layer.

    Parameters
    ----------
    spots
        Sizes of the axes that windows move along.
    layer
        Layer with ``strides``, ``padding`` and perhaps ``dilation_rate``.
    sizes
        Sizes of a window.

    Returns
    -------
    tuple
        Sizes of the axes of the result; and an array of shape (windows, spots of a window) with the
        place of each spot among all spots, or -1 for padding. Padding is TensorFlow's.
    """
    strides = _for_each(layer.strides, len(spots))
    steps = _for_each(getattr(layer, "dilation_rate", 1), len(spots))
    axes = [
        _find_along(size, window, stride, step, layer.padding)
        for size, window, stride, step in zip(spots, sizes, strides, steps, strict=True)
    ]
    flat, is_outside = np.zeros((), np.int64), np.zeros((), np.bool_)
    for number, (axis, size) in enumerate(zip(axes, spots, strict=True)):
        shape = np.ones((2, len(spots)), np.int64)  # windows, then spots of a window
        shape[:, number] = axis.shape
        along = axis.reshape(shape.ravel())
        flat, is_outside = flat * size + along, is_outside | (along < 0)
    found = tuple(len(axis) for axis in axes)
    return found, np.where(is_outside, -1, flat).reshape(int(np.prod(found)), -1)


def _find_along(size: int, window: int, stride: int, step: int, padding: str) -> Array:
    """Return the places along one axis, of shape (windows, window); -1 is padding."""
    reach = (window - 1) * step + 1
    if padding == "same":
        count = -(-size // stride)
        before = max((count - 1) * stride + reach - size, 0) // 2
    else:
        before = reach - 1 if padding == "causal" else 0
        count = (size + before - reach) // stride + 1
    starts = np.arange(count) * stride - before
    places = starts[:, None] + np.arange(window) * step
    return np.where((places < 0) | (places >= size), -1, places)


def _for_each(value: Any, axes: int) -> Sequence[int]:
    return (value,) * axes if isinstance(value, int) else tuple(value)
