"""Translate each Keras layer to operations in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from pybackend.core.words import setting
from pybackend.sql.builder import (
    GraphBuilder,
    Shape,
    Value,
    check_layer,
    find_windows,
    numbers_of,
    places_of,
)
from pybackend.sql.operations import Array, Fold, Lookup, Slope

# Called with the layer's tensors; only those in `_SEVERAL` take more than one.
Lower = Callable[..., Value]


def lower_layer(builder: GraphBuilder, layer: Any, values: Sequence[Value]) -> Value:
    """Add the operations of a layer to the graph and return its output; `InputError` names a layer
    that cannot be translated, and the reason.
    """
    builder.layer = layer
    lower = LAYERS.get(type(layer).__name__)
    if lower is None:
        raise builder.refuse(f"the supported layers are {', '.join(sorted(LAYERS))}")
    check_layer(builder, layer)
    if len(values) > 1 and type(layer).__name__ not in _SEVERAL:
        raise builder.refuse(f"it is called with {len(values)} tensors")
    return lower(builder, layer, *values)


def _dense(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    kernel = numbers_of(layer.kernel)
    made = builder.linear(value, kernel, _bias(layer), (*value.shape[:-1], kernel.shape[1]))
    return builder.activate(made, layer.activation)


def _conv(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    kernel, groups = numbers_of(layer.kernel), layer.groups
    channels, filters = value.shape[-1], kernel.shape[-1]
    spots, windows = find_windows(value.shape[:-1], layer, layer.kernel_size)
    taps = windows.shape[-1]
    places = _with_channels(windows, channels)  # (positions, taps, channels)
    split = places.reshape(-1, taps, groups, channels // groups).transpose(0, 2, 1, 3)
    # Keras's kernel is (taps, inputs of a group, filters), with the filters of each group together.
    # For each group: (taps x inputs, outputs).
    apart = kernel.reshape(taps, channels // groups, groups, filters // groups)
    each = apart.transpose(2, 0, 1, 3).reshape(groups, -1, filters // groups)
    made = builder.linear(builder.gather(value, split), each, _bias(layer), (*spots, filters))
    return builder.activate(made, layer.activation)


def _depthwise(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    made = _spread(builder, layer, value, numbers_of(layer.kernel), _bias(layer))
    return builder.activate(made, layer.activation)


def _spread(
    builder: GraphBuilder, layer: Any, value: Value, kernel: Array, bias: Array | None
) -> Value:
    channels, times = (int(size) for size in kernel.shape[-2:])
    spots, windows = find_windows(value.shape[:-1], layer, layer.kernel_size)
    places = _with_channels(windows, channels).transpose(0, 2, 1)  # (positions, channels, taps)
    each = kernel.reshape(-1, channels, times).transpose(1, 0, 2)
    return builder.linear(builder.gather(value, places), each, bias, (*spots, channels * times))


def _separable(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    spread = _spread(builder, layer, value, numbers_of(layer.depthwise_kernel), None)
    points = numbers_of(layer.pointwise_kernel)
    *_, inputs, outputs = points.shape
    kernel = points.reshape(inputs, outputs)
    made = builder.linear(spread, kernel, _bias(layer), (*spread.shape[:-1], outputs))
    return builder.activate(made, layer.activation)


def _bias(layer: Any) -> Array | None:
    return numbers_of(layer.bias) if layer.use_bias else None


def _with_channels(windows: Array, channels: int) -> Array:
    """Return the positions of all channels at each spot, on an additional axis; -1 is padding."""
    places = windows[..., None] * channels + np.arange(channels)
    return np.where(windows[..., None] < 0, -1, places)


def _pool(operation: str, builder: GraphBuilder, layer: Any, value: Value) -> Value:
    spots, windows = find_windows(value.shape[:-1], layer, layer.pool_size)
    places = _with_channels(windows, value.shape[-1]).swapaxes(1, 2)
    return _reduce(builder, operation, value, places, (*spots, value.shape[-1]))


def _pool_all(operation: str, builder: GraphBuilder, layer: Any, value: Value) -> Value:
    channels = value.shape[-1]
    places = places_of(value.shape).reshape(-1, channels).T
    ones = (1,) * (len(value.shape) - 1) if layer.keepdims else ()
    return _reduce(builder, operation, value, places, (*ones, channels))


def _reduce(
    builder: GraphBuilder, operation: str, value: Value, places: Array, shape: Shape
) -> Value:
    if operation == "maximum":
        return Value(builder.reduce("maximum", value, places).name, shape)
    # As in TensorFlow, padding does not count.
    total = builder.reduce("sum", value, places)
    return Value(builder.scale(total, 1 / (places >= 0).sum(axis=-1), 0.0).name, shape)


def _normalize_batch(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    mean, variance = (numbers_of(x) for x in (layer.moving_mean, layer.moving_variance))
    factor = 1 / np.sqrt(variance.astype(np.float64) + layer.epsilon)
    if layer.scale:
        factor = factor * numbers_of(layer.gamma)
    shift = -mean * factor + (numbers_of(layer.beta) if layer.center else 0.0)
    axis = layer.axis[0] if isinstance(layer.axis, (list, tuple)) else layer.axis
    shape = [1] * len(value.shape)
    shape[axis - 1 if axis > 0 else axis] = -1
    return builder.scale(value, factor.reshape(shape), shift.reshape(shape))


def _normalize(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    mean, variance = (numbers_of(x).astype(np.float64)[0] for x in (layer.mean, layer.variance))
    deviation = np.maximum(np.sqrt(variance), keras.config.epsilon())
    if layer.invert:
        return builder.scale(value, deviation, mean)
    # In Keras's order: a difference of large numbers is exact only before they are scaled.
    return builder.scale(builder.scale(value, 1.0, -mean), 1 / deviation, 0.0)


def _normalize_layer(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    axes = list(layer.axis) if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    if axes not in ([-1], [len(value.shape)]):
        raise builder.refuse(f"it normalizes over {setting(axis=layer.axis)}, not the last")
    if getattr(layer, "rms_scaling", False):
        raise builder.refuse(setting(rms_scaling=True))
    places, count = places_of(value.shape), value.shape[-1]
    # Mean and variance of each row, repeated for each of its numbers.
    again = np.repeat(places_of(value.shape[:-1])[..., None], count, axis=-1)
    mean = builder.scale(builder.reduce("sum", value, places), 1 / count, 0.0)
    apart = builder.combine("subtract", [value, builder.gather(mean, again)])
    squares = builder.combine("multiply", [apart, apart])
    variance = builder.scale(builder.reduce("sum", squares, places), 1 / count, 0.0)
    factor = builder.gather(builder.map(variance, "rsqrt", float(layer.epsilon)), again)
    scaled = builder.combine("multiply", [apart, factor])
    gamma = numbers_of(layer.gamma) if layer.scale else 1.0
    return builder.scale(scaled, gamma, numbers_of(layer.beta) if layer.center else 0.0)


def _reshape(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    shape = layer.compute_output_shape((1, *value.shape))[1:]
    return Value(value.name, tuple(int(size) for size in shape))


def _move(
    move: Callable[[Any, Array], Array], builder: GraphBuilder, layer: Any, value: Value
) -> Value:
    """Translate a layer that only moves numbers, from its effect on positions."""
    return builder.gather(value, move(layer, places_of(value.shape)))


def _by_axis(ends: Any) -> Any:
    """Return the numbers at the beginning and the end of each axis; 1-D layers have one pair."""
    return ends if isinstance(ends[0], (list, tuple)) else [ends]


def _pad(layer: Any, places: Array) -> Array:
    return np.pad(places, [*_by_axis(layer.padding), (0, 0)], constant_values=-1)


def _crop(layer: Any, places: Array) -> Array:
    ends = zip(_by_axis(layer.cropping), places.shape, strict=False)
    return places[tuple(slice(first, size - last) for (first, last), size in ends)]


def _average(builder: GraphBuilder, layer: Any, *values: Value) -> Value:
    return builder.scale(builder.combine("add", values), 1 / len(values), 0.0)


def _concatenate(builder: GraphBuilder, layer: Any, *values: Value) -> Value:
    axis = layer.axis if layer.axis >= 0 else layer.axis + len(values[0].shape) + 1
    if axis == 0:
        raise builder.refuse(f"{setting(axis=0)}: it joins rows, which SQL computes separately")
    return builder.concatenate(values, axis - 1)


def _embed(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    if layer.mask_zero:
        raise builder.refuse(f"{setting(mask_zero=True)}: later layers would need the mask")
    table = numbers_of(layer.embeddings)
    return builder.add(Lookup(table), [value], (*value.shape, table.shape[1]))


def _relu(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    if layer.threshold or layer.max_value not in (None, 6):
        raise builder.refuse("a ReLU with `threshold`, or a `max_value` other than 6")
    if layer.negative_slope:
        if layer.max_value is not None:
            raise builder.refuse("a ReLU with `negative_slope` and `max_value`")
        return _leaky_relu(builder, layer, value)
    return builder.map(value, "relu" if layer.max_value is None else "relu6")


def _leaky_relu(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    return builder.map(value, "leaky_relu", float(layer.negative_slope))


def _prelu(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    slope = np.broadcast_to(numbers_of(layer.alpha), value.shape).ravel()
    return builder.add(Slope(slope), [value], value.shape)


def _softmax(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    if layer.axis not in (-1, len(value.shape)):
        raise builder.refuse(f"a softmax over the axis {layer.axis}, which is not the last")
    return builder.softmax(value)


def _each_time(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    if type(layer.layer).__name__ != "Dense":
        raise builder.refuse(f"it wraps {type(layer.layer).__name__}: only Dense is supported")
    check_layer(builder, layer.layer)
    return _dense(builder, layer.layer, value)


# Recurrent layers: their cells, applied to one step of a sequence at a time.

_MERGES = {"sum": "add", "mul": "multiply", "ave": "add"}


def _bidirectional(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    for inner in (layer.forward_layer, layer.backward_layer):
        if (kind := type(inner).__name__) not in _CELLS:
            raise builder.refuse(f"it wraps {kind}: only GRU, LSTM and SimpleRNN are supported")
        check_layer(builder, inner)
    both = [_recur(builder, one, value) for one in (layer.forward_layer, layer.backward_layer)]
    if layer.backward_layer.return_sequences:
        both[1] = builder.gather(both[1], places_of(both[1].shape)[::-1])
    if layer.merge_mode == "concat":
        return builder.concatenate(both, len(both[0].shape) - 1)
    if layer.merge_mode not in _MERGES:
        raise builder.refuse(setting(merge_mode=layer.merge_mode))
    merged = builder.combine(_MERGES[layer.merge_mode], both)
    return builder.scale(merged, 0.5, 0.0) if layer.merge_mode == "ave" else merged


def _recur(builder: GraphBuilder, layer: Any, value: Value) -> Value:
    if getattr(layer, "recurrent_activation", None) is keras.activations.softmax:
        raise builder.refuse(setting(recurrent_activation="softmax"))
    for option in ("return_state", "stateful"):
        if getattr(layer, option):
            raise builder.refuse(setting(**{option: True}))
    steps, _ = value.shape
    if layer.go_backwards:
        value = builder.gather(value, places_of(value.shape)[::-1])
    cell = layer.cell
    kernel = numbers_of(cell.kernel)
    bias, inner_bias = _bias(cell), None
    if bias is not None and bias.ndim == 2:  # a GRU may have biases of its state as well
        bias, inner_bias = bias
    # Projections of the inputs are computed for all steps at once.
    projected = builder.linear(value, kernel, bias, (steps, kernel.shape[1]))
    inner = GraphBuilder()
    inner.layer = builder.layer
    states = 2 if type(layer).__name__ == "LSTM" else 1  # an LSTM also carries its memory
    state = Value(inner.graph.add_input("state", states * cell.units), (states * cell.units,))
    part = Value(inner.graph.add_input("part", kernel.shape[1]), (kernel.shape[1],))
    found = _CELLS[type(layer).__name__](inner, cell, state, part, inner_bias)
    inner.graph.outputs = (found.name,)
    fold = Fold(inner.graph, steps, state.size, cell.units, layer.return_sequences)
    shape = (steps, cell.units) if layer.return_sequences else (cell.units,)
    return builder.add(fold, [projected], shape)


def _slice(builder: GraphBuilder, value: Value, number: int, units: int, count: int = 1) -> Value:
    start = number * units
    return builder.gather(value, np.arange(start, start + count * units))


def _gru(builder: GraphBuilder, cell: Any, state: Value, part: Value, bias: Any) -> Value:
    units = cell.units
    recurrent = numbers_of(cell.recurrent_kernel)
    if cell.reset_after:
        hidden = builder.linear(state, recurrent, bias, (3 * units,))
        gates = _slice(builder, hidden, 0, units, 2)
    else:
        gates = builder.linear(state, recurrent[:, : 2 * units], None, (2 * units,))
    gates = builder.combine("add", [_slice(builder, part, 0, units, 2), gates])
    gates = builder.activate(gates, cell.recurrent_activation)
    update, reset = (_slice(builder, gates, number, units) for number in (0, 1))
    if cell.reset_after:
        kept = builder.combine("multiply", [reset, _slice(builder, hidden, 2, units)])
    else:
        kept = builder.combine("multiply", [reset, state])
        kept = builder.linear(kept, recurrent[:, 2 * units :], None, (units,))
    candidate = builder.combine("add", [_slice(builder, part, 2, units), kept])
    candidate = builder.activate(candidate, cell.activation)
    # update * state + (1 - update) * candidate, with one product
    change = builder.combine("subtract", [state, candidate])
    return builder.combine("add", [candidate, builder.combine("multiply", [update, change])])


def _lstm(builder: GraphBuilder, cell: Any, state: Value, part: Value, bias: Any) -> Value:
    units = cell.units
    hidden, carried = (_slice(builder, state, number, units) for number in (0, 1))
    gates = builder.linear(hidden, numbers_of(cell.recurrent_kernel), None, (4 * units,))
    gates = builder.combine("add", [part, gates])
    opened = builder.activate(gates, cell.recurrent_activation)
    enters, forgets, shows = (_slice(builder, opened, number, units) for number in (0, 1, 3))
    new = builder.activate(_slice(builder, gates, 2, units), cell.activation)
    terms = [builder.combine("multiply", pair) for pair in ([forgets, carried], [enters, new])]
    carried = builder.combine("add", terms)
    hidden = builder.combine("multiply", [shows, builder.activate(carried, cell.activation)])
    return builder.concatenate([hidden, carried], 0)


def _simple(builder: GraphBuilder, cell: Any, state: Value, part: Value, bias: Any) -> Value:
    hidden = builder.linear(state, numbers_of(cell.recurrent_kernel), None, (cell.units,))
    return builder.activate(builder.combine("add", [part, hidden]), cell.activation)


_CELLS = {"GRU": _gru, "LSTM": _lstm, "SimpleRNN": _simple}


# Layers that take several tensors.
_SEVERAL = {"Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"}
# They only do something in training.
_PASSING = (
    "ActivityRegularization AlphaDropout Dropout GaussianDropout GaussianNoise Identity "
    "SpatialDropout1D SpatialDropout2D"
)
# Names without their ending, 1D or 2D.
_ALONG_AXES: dict[str, Lower] = {
    "AveragePooling": partial(_pool, "mean"),
    "Conv": _conv,
    "Cropping": partial(_move, _crop),
    "DepthwiseConv": _depthwise,
    "GlobalAveragePooling": partial(_pool_all, "mean"),
    "GlobalMaxPooling": partial(_pool_all, "maximum"),
    "MaxPooling": partial(_pool, "maximum"),
    "SeparableConv": _separable,
    "ZeroPadding": partial(_move, _pad),
}
LAYERS: dict[str, Lower] = {
    **dict.fromkeys(_PASSING.split(), lambda builder, layer, value: value),
    "Activation": lambda builder, layer, value: builder.activate(value, layer.activation),
    "Add": lambda builder, layer, *values: builder.combine("add", values),
    "Average": _average,
    "BatchNormalization": _normalize_batch,
    "Bidirectional": _bidirectional,
    "Concatenate": _concatenate,
    "Dense": _dense,
    "ELU": lambda builder, layer, value: builder.map(value, "elu", float(layer.alpha)),
    "Embedding": _embed,
    "Flatten": _reshape,
    "GRU": _recur,
    "LSTM": _recur,
    "LayerNormalization": _normalize_layer,
    "LeakyReLU": _leaky_relu,
    "Maximum": lambda builder, layer, *values: builder.combine("maximum", values),
    "Minimum": lambda builder, layer, *values: builder.combine("minimum", values),
    "Multiply": lambda builder, layer, *values: builder.combine("multiply", values),
    "Normalization": _normalize,
    "PReLU": _prelu,
    "Permute": partial(
        _move, lambda layer, places: places.transpose([axis - 1 for axis in layer.dims])
    ),
    "ReLU": _relu,
    "RepeatVector": partial(_move, lambda layer, places: np.repeat(places[None], layer.n, axis=0)),
    "Rescaling": lambda builder, layer, value: builder.scale(value, layer.scale, layer.offset),
    "Reshape": _reshape,
    "SimpleRNN": _recur,
    "Softmax": _softmax,
    "Subtract": lambda builder, layer, *values: builder.combine("subtract", values),
    "TimeDistributed": _each_time,
    **{f"{name}{axes}D": lower for name, lower in _ALONG_AXES.items() for axes in (1, 2)},
}
