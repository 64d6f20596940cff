"""Translate each Keras layer to operations in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from pybackend.core.words import setting
from pybackend.sql.graph import Array, Lookup, Slope
from pybackend.sql.lowering import (
    Lowering,
    Shape,
    Value,
    check_layer,
    find_windows,
    numbers_of,
    places_of,
)
from pybackend.sql.recurrent import lower_bidirectional, lower_recurrent

# Called with the layer's tensors; only those in `_SEVERAL` take more than one.
Lower = Callable[..., Value]


def lower_layer(lowering: Lowering, layer: Any, values: Sequence[Value]) -> Value:
    """Add the operations of a layer to the graph and return its output.

    Raises
    ------
    InputError
        The layer cannot be translated to SQL; the message names it and the reason.
    """
    lowering.layer = layer
    lower = LAYERS.get(type(layer).__name__)
    if lower is None:
        raise lowering.refuse(f"the supported layers are {', '.join(sorted(LAYERS))}")
    check_layer(lowering, layer)
    if len(values) > 1 and type(layer).__name__ not in _SEVERAL:
        raise lowering.refuse(f"it is called with {len(values)} tensors")
    return lower(lowering, layer, *values)


def _keep(lowering: Lowering, layer: Any, value: Value) -> Value:
    return value


def _dense(lowering: Lowering, layer: Any, value: Value) -> Value:
    kernel = numbers_of(layer.kernel)
    bias = numbers_of(layer.bias) if layer.use_bias else None
    made = lowering.linear(value, kernel, bias, (*value.shape[:-1], kernel.shape[1]))
    return lowering.activate(made, layer.activation)


def _conv(lowering: Lowering, layer: Any, value: Value) -> Value:
    return _convolve(lowering, layer, value, numbers_of(layer.kernel), _bias(layer), layer.groups)


def _convolve(
    lowering: Lowering, layer: Any, value: Value, kernel: Array, bias: Array | None, groups: int
) -> Value:
    channels, filters = value.shape[-1], kernel.shape[-1]
    spots, windows = find_windows(value.shape[:-1], layer, layer.kernel_size)
    taps = windows.shape[-1]
    places = _with_channels(windows, channels)  # (positions, taps, channels)
    split = places.reshape(-1, taps, groups, channels // groups).transpose(0, 2, 1, 3)
    # For each group: (taps x inputs, outputs).
    apart = kernel.reshape(taps, channels // groups, groups, filters // groups)
    each = apart.transpose(2, 0, 1, 3).reshape(groups, -1, filters // groups)
    made = lowering.linear(lowering.gather(value, split), each, bias, (*spots, filters))
    return lowering.activate(made, layer.activation)


def _depthwise(lowering: Lowering, layer: Any, value: Value) -> Value:
    made = _spread(lowering, layer, value, numbers_of(layer.kernel), _bias(layer))
    return lowering.activate(made, layer.activation)


def _spread(
    lowering: Lowering, layer: Any, value: Value, kernel: Array, bias: Array | None
) -> Value:
    channels, times = (int(size) for size in kernel.shape[-2:])
    spots, windows = find_windows(value.shape[:-1], layer, layer.kernel_size)
    places = _with_channels(windows, channels).transpose(0, 2, 1)  # (positions, channels, taps)
    each = kernel.reshape(-1, channels, times).transpose(1, 0, 2)
    return lowering.linear(lowering.gather(value, places), each, bias, (*spots, channels * times))


def _separable(lowering: Lowering, layer: Any, value: Value) -> Value:
    spread = _spread(lowering, layer, value, numbers_of(layer.depthwise_kernel), None)
    points = numbers_of(layer.pointwise_kernel)
    *_, inputs, outputs = points.shape
    kernel = points.reshape(inputs, outputs)
    made = lowering.linear(spread, kernel, _bias(layer), (*spread.shape[:-1], outputs))
    return lowering.activate(made, layer.activation)


def _bias(layer: Any) -> Array | None:
    return numbers_of(layer.bias) if layer.use_bias else None


def _with_channels(windows: Array, channels: int) -> Array:
    """Return the positions of all channels at each spot, on an additional axis; -1 is padding."""
    places = windows[..., None] * channels + np.arange(channels)
    return np.where(windows[..., None] < 0, -1, places)


def _pool(operation: str) -> Lower:
    def lower(lowering: Lowering, layer: Any, value: Value) -> Value:
        spots, windows = find_windows(value.shape[:-1], layer, layer.pool_size)
        places = _with_channels(windows, value.shape[-1]).swapaxes(1, 2)
        return _reduce(lowering, operation, value, places, (*spots, value.shape[-1]))

    return lower


def _pool_all(operation: str) -> Lower:
    def lower(lowering: Lowering, layer: Any, value: Value) -> Value:
        channels = value.shape[-1]
        places = places_of(value.shape).reshape(-1, channels).T
        ones = (1,) * (len(value.shape) - 1) if layer.keepdims else ()
        return _reduce(lowering, operation, value, places, (*ones, channels))

    return lower


def _reduce(lowering: Lowering, operation: str, value: Value, places: Array, shape: Shape) -> Value:
    if operation == "maximum":
        found = lowering.reduce("maximum", value, places)
        return Value(found.name, shape)
    found = lowering.reduce("sum", value, places)
    counts = (places >= 0).sum(axis=-1)
    return Value(lowering.scale(found, 1 / counts, 0.0).name, shape)


def _normalize_batch(lowering: Lowering, layer: Any, value: Value) -> Value:
    mean, variance = (numbers_of(x) for x in (layer.moving_mean, layer.moving_variance))
    factor = 1 / np.sqrt(variance.astype(np.float64) + layer.epsilon)
    if layer.scale:
        factor = factor * numbers_of(layer.gamma)
    shift = -mean * factor + (numbers_of(layer.beta) if layer.center else 0.0)
    axis = layer.axis[0] if isinstance(layer.axis, (list, tuple)) else layer.axis
    shape = [1] * len(value.shape)
    shape[axis - 1 if axis > 0 else axis] = -1
    return lowering.scale(value, factor.reshape(shape), shift.reshape(shape))


def _normalize(lowering: Lowering, layer: Any, value: Value) -> Value:
    mean, variance = (numbers_of(x).astype(np.float64)[0] for x in (layer.mean, layer.variance))
    deviation = np.maximum(np.sqrt(variance), keras.config.epsilon())
    if layer.invert:
        return lowering.scale(value, deviation, mean)
    # In Keras's order: a difference of large numbers is exact only before they are scaled.
    return lowering.scale(lowering.scale(value, 1.0, -mean), 1 / deviation, 0.0)


def _normalize_layer(lowering: Lowering, layer: Any, value: Value) -> Value:
    axes = list(layer.axis) if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    if axes not in ([-1], [len(value.shape)]):
        raise lowering.refuse(
            f"a normalization over {setting(axis=layer.axis)}, which is not the last"
        )
    if getattr(layer, "rms_scaling", False):
        raise lowering.refuse(setting(rms_scaling=True))
    places, count = places_of(value.shape), value.shape[-1]
    # Mean and variance of each row, repeated for each of its numbers.
    again = np.repeat(places_of(value.shape[:-1])[..., None], count, axis=-1)
    mean = lowering.scale(lowering.reduce("sum", value, places), 1 / count, 0.0)
    apart = lowering.combine("subtract", [value, lowering.gather(mean, again)])
    squares = lowering.combine("multiply", [apart, apart])
    variance = lowering.scale(lowering.reduce("sum", squares, places), 1 / count, 0.0)
    factor = lowering.gather(lowering.map(variance, "rsqrt", float(layer.epsilon)), again)
    scaled = lowering.combine("multiply", [apart, factor])
    gamma = numbers_of(layer.gamma) if layer.scale else 1.0
    return lowering.scale(scaled, gamma, numbers_of(layer.beta) if layer.center else 0.0)


def _rescale(lowering: Lowering, layer: Any, value: Value) -> Value:
    return lowering.scale(value, np.asarray(layer.scale), np.asarray(layer.offset))


def _reshape(lowering: Lowering, layer: Any, value: Value) -> Value:
    shape = layer.compute_output_shape((1, *value.shape))[1:]
    return Value(value.name, tuple(int(size) for size in shape))


def _move(move: Callable[[Any, Array], Array]) -> Lower:
    """Return the translation of a layer that only moves numbers, from its effect on positions."""

    def lower(lowering: Lowering, layer: Any, value: Value) -> Value:
        return lowering.gather(value, move(layer, places_of(value.shape)))

    return lower


def _permute(layer: Any, places: Array) -> Array:
    return places.transpose([axis - 1 for axis in layer.dims])


def _repeat(layer: Any, places: Array) -> Array:
    return np.repeat(places[None], layer.n, axis=0)


def _pad(layer: Any, places: Array) -> Array:
    padding = layer.padding if isinstance(layer.padding[0], (list, tuple)) else [layer.padding]
    return np.pad(places, [*padding, (0, 0)], constant_values=-1)


def _crop(layer: Any, places: Array) -> Array:
    cropping = layer.cropping if isinstance(layer.cropping[0], (list, tuple)) else [layer.cropping]
    ends = [
        slice(first, size - last)
        for (first, last), size in zip(cropping, places.shape, strict=False)
    ]
    return places[tuple(ends)]


def _merge(operation: str) -> Lower:
    def lower(lowering: Lowering, layer: Any, *values: Value) -> Value:
        return lowering.combine(operation, values)

    return lower


def _average(lowering: Lowering, layer: Any, *values: Value) -> Value:
    return lowering.scale(lowering.combine("add", values), 1 / len(values), 0.0)


def _concatenate(lowering: Lowering, layer: Any, *values: Value) -> Value:
    axis = layer.axis if layer.axis >= 0 else layer.axis + len(values[0].shape) + 1
    if axis == 0:
        raise lowering.refuse(
            f"{setting(axis=0)}: it joins rows, but SQL computes each row separately"
        )
    return lowering.concatenate(values, axis - 1)


def _embed(lowering: Lowering, layer: Any, value: Value) -> Value:
    if layer.mask_zero:
        raise lowering.refuse(
            f"{setting(mask_zero=True)}: the layers that follow would need the mask"
        )
    table = numbers_of(layer.embeddings)
    return lowering.add(Lookup(table), [value], (*value.shape, table.shape[1]))


def _activation(lowering: Lowering, layer: Any, value: Value) -> Value:
    return lowering.activate(value, layer.activation)


def _relu(lowering: Lowering, layer: Any, value: Value) -> Value:
    if layer.threshold or layer.max_value not in (None, 6):
        raise lowering.refuse("a ReLU with `threshold`, or a `max_value` other than 6")
    if layer.negative_slope:
        if layer.max_value is not None:
            raise lowering.refuse("a ReLU with `negative_slope` and `max_value`")
        return lowering.map(value, "leaky_relu", float(layer.negative_slope))
    return lowering.map(value, "relu" if layer.max_value is None else "relu6")


def _leaky_relu(lowering: Lowering, layer: Any, value: Value) -> Value:
    return lowering.map(value, "leaky_relu", float(layer.negative_slope))


def _elu(lowering: Lowering, layer: Any, value: Value) -> Value:
    return lowering.map(value, "elu", float(layer.alpha))


def _prelu(lowering: Lowering, layer: Any, value: Value) -> Value:
    slope = np.broadcast_to(numbers_of(layer.alpha), value.shape).ravel()
    return lowering.add(Slope(slope), [value], value.shape)


def _softmax(lowering: Lowering, layer: Any, value: Value) -> Value:
    if layer.axis not in (-1, len(value.shape)):
        raise lowering.refuse(f"a softmax over the axis {layer.axis}, which is not the last")
    return lowering.softmax(value)


def _each_time(lowering: Lowering, layer: Any, value: Value) -> Value:
    if type(layer.layer).__name__ != "Dense":
        raise lowering.refuse(f"it wraps {type(layer.layer).__name__}: only Dense is supported")
    check_layer(lowering, layer.layer)
    return _dense(lowering, layer.layer, value)


# Layers that take several tensors.
_SEVERAL = {"Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"}
LAYERS: dict[str, Lower] = {
    "Activation": _activation,
    "ActivityRegularization": _keep,
    "Add": _merge("add"),
    "AlphaDropout": _keep,
    "Average": _average,
    "AveragePooling1D": _pool("mean"),
    "AveragePooling2D": _pool("mean"),
    "BatchNormalization": _normalize_batch,
    "Bidirectional": lower_bidirectional,
    "Concatenate": _concatenate,
    "Conv1D": _conv,
    "Conv2D": _conv,
    "Cropping1D": _move(_crop),
    "Cropping2D": _move(_crop),
    "Dense": _dense,
    "DepthwiseConv1D": _depthwise,
    "DepthwiseConv2D": _depthwise,
    "Dropout": _keep,
    "ELU": _elu,
    "Embedding": _embed,
    "Flatten": _reshape,
    "GRU": lower_recurrent,
    "GaussianDropout": _keep,
    "GaussianNoise": _keep,
    "GlobalAveragePooling1D": _pool_all("mean"),
    "GlobalAveragePooling2D": _pool_all("mean"),
    "GlobalMaxPooling1D": _pool_all("maximum"),
    "GlobalMaxPooling2D": _pool_all("maximum"),
    "Identity": _keep,
    "LSTM": lower_recurrent,
    "LayerNormalization": _normalize_layer,
    "LeakyReLU": _leaky_relu,
    "MaxPooling1D": _pool("maximum"),
    "MaxPooling2D": _pool("maximum"),
    "Maximum": _merge("maximum"),
    "Minimum": _merge("minimum"),
    "Multiply": _merge("multiply"),
    "Normalization": _normalize,
    "PReLU": _prelu,
    "Permute": _move(_permute),
    "ReLU": _relu,
    "RepeatVector": _move(_repeat),
    "Rescaling": _rescale,
    "Reshape": _reshape,
    "SeparableConv1D": _separable,
    "SeparableConv2D": _separable,
    "SimpleRNN": lower_recurrent,
    "Softmax": _softmax,
    "SpatialDropout1D": _keep,
    "SpatialDropout2D": _keep,
    "Subtract": _merge("subtract"),
    "TimeDistributed": _each_time,
    "ZeroPadding1D": _move(_pad),
    "ZeroPadding2D": _move(_pad),
}
