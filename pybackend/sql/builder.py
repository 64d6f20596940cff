"""Nodes that layers add to a graph: values with tensor shapes, and windows over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from pybackend.core.errors import InputError
from pybackend.core.words import setting, show
from pybackend.sql import operations as ops
from pybackend.sql.database import FORMULAS
from pybackend.sql.operations import Array, Graph

Shape = tuple[int, ...]


def find_windows(spots: Shape, layer: Any, sizes: Sequence[int]) -> tuple[Shape, Array]:
    """Return the sizes of a layer's result along the axes that its windows move along, and an array
    of shape (windows, spots of a window): the position of each spot among all, or -1 for padding.

    Padding follows TensorFlow. The layer has ``strides``, ``padding`` and perhaps
    ``dilation_rate``.
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
    """Return the positions along one axis, with shape (windows, window); -1 is padding."""
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


# Smaller than any number of a network, so it never is the maximum.
LOWEST = float(np.finfo(np.float32).min)
# Functions of one number, by Keras's names; each dialect knows all of them.
FUNCTIONS = tuple(name for name in FORMULAS if name != "rsqrt")
_CONSTANTS: dict[str, tuple[float, ...]] = {"celu": (1.0,), "elu": (1.0,), "leaky_relu": (0.2,)}


@dataclass(frozen=True)
class Value:
    """Tensor of one row: the name of its numbers in the graph, and its shape."""

    name: str
    shape: Shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class GraphBuilder:
    """Builder of a graph from the operations of layers; ``layer`` is the one that errors name."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.layer: Any = None

    def refuse(self, what: str) -> InputError:
        """Return the error that the current layer cannot be translated to SQL, with the reason."""
        layer = f"{show(self.layer.name)} ({type(self.layer).__name__})"
        return InputError(f"the layer {layer} cannot be converted to SQL: {what}")

    def add(self, operation: Any, values: Sequence[Value], shape: Shape) -> Value:
        names = [value.name for value in values]
        return Value(self.graph.add(operation, names, math.prod(shape), self.layer.name), shape)

    def gather(self, value: Value, places: Array, fill: float = 0.0) -> Value:
        """Select numbers by position in the flat array, in the shape of ``places``."""
        flat = places.ravel()
        if flat.size == value.size and (flat == np.arange(flat.size)).all():
            return Value(value.name, places.shape)
        return self.add(ops.Gather(flat, fill), [value], places.shape)

    def linear(self, value: Value, kernel: Array, bias: Array | None, shape: Shape) -> Value:
        """Add sums of products, by groups if the kernel has three axes."""
        kernel = kernel.reshape(-1, *kernel.shape[-2:])
        groups, _, outputs = kernel.shape
        whole = np.zeros((groups, outputs), np.float32) if bias is None else bias
        return self.add(ops.Linear(kernel, whole.reshape(groups, outputs)), [value], shape)

    def scale(self, value: Value, factor: Any, shift: Any) -> Value:
        """Multiply numbers by a factor and add a shift, both broadcast to the tensor."""
        both = [np.broadcast_to(np.asarray(x, np.float64), value.shape) for x in (factor, shift)]
        factor, shift = _find_period(*both)
        return self.add(ops.Scale(factor, shift), [value], value.shape)

    def combine(self, operation: str, values: Sequence[Value]) -> Value:
        """Combine tensors element by element, broadcast to one shape."""
        try:
            shape = np.broadcast_shapes(*(value.shape for value in values))
        except ValueError:
            shapes = " and ".join(str(value.shape) for value in values)
            raise self.refuse(f"its inputs have the shapes {shapes}") from None
        whole = [self.gather(v, np.broadcast_to(places_of(v.shape), shape)) for v in values]
        return self.add(ops.Combine(operation), whole, shape)

    def concatenate(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenate tensors along an axis, counted without the axis of rows."""
        starts = np.cumsum([0, *(value.size for value in values)])
        joined = self.add(ops.Concatenate(), values, (int(starts[-1]),))
        places = [places_of(v.shape) + start for v, start in zip(values, starts, strict=False)]
        return self.gather(joined, np.concatenate(places, axis))

    def reduce(self, operation: str, value: Value, places: Array) -> Value:
        """Reduce to the sum or maximum over the last axis of ``places``, ignoring -1."""
        fill = LOWEST if operation == "maximum" else 0.0
        taken = self.gather(value, places, fill)
        return self.add(ops.Reduce(operation, places.shape[-1]), [taken], places.shape[:-1])

    def activate(self, value: Value, activation: Any) -> Value:
        """Apply an activation of a layer, which may be any callable; only Keras's own can become
        SQL.
        """
        try:
            known = keras.activations.serialize(activation)
        except TypeError:  # such as a partial function
            known = None
        kind = type(activation).__name__
        name = known if isinstance(known, str) else getattr(activation, "__name__", kind)
        if not isinstance(known, str) or keras.activations.get(known) is not activation:
            raise self.refuse(f"the activation {show(name)} is not one of Keras's")
        if name == "linear":
            return value
        if name == "softmax":
            return self.softmax(value)
        if name not in FUNCTIONS:
            listed = ", ".join((*FUNCTIONS, "softmax"))
            raise self.refuse(
                f"the activation {show(name)} is not supported; supported are {listed}"
            )
        return self.map(value, name, *_CONSTANTS.get(name, ()))

    def map(self, value: Value, function: str, *constants: float) -> Value:
        return self.add(ops.Map(function, constants), [value], value.shape)

    def softmax(self, value: Value) -> Value:
        return self.add(ops.Softmax(value.shape[-1]), [value], value.shape)


def check_layer(builder: GraphBuilder, layer: Any) -> None:
    """Reject a layer whose settings cannot be translated; the error names the builder's layer,
    which differs for a wrapped one.
    """
    name = type(layer).__name__
    if type(layer) is not getattr(keras.layers, name, None):
        raise builder.refuse(f"{name} is not a class of keras.layers")
    if getattr(layer, "quantization_mode", None) is not None:
        raise builder.refuse("its weights are quantized")
    if layer.compute_dtype != "float32" and not isinstance(layer, keras.layers.InputLayer):
        raise builder.refuse(f"it computes in {layer.compute_dtype}, SQL in float32 or better")
    if getattr(layer, "data_format", "channels_last") != "channels_last":
        raise builder.refuse(setting(data_format="channels_first"))


def places_of(shape: Shape) -> Array:
    """Return the position of each number of a tensor in the flat array, in the tensor's shape."""
    return np.arange(math.prod(shape)).reshape(shape)


def numbers_of(variable: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _find_period(factor: Array, shift: Array) -> tuple[Array, Array]:
    """Return the smallest blocks of trailing axes that both arrays repeat."""
    for axis in range(factor.ndim, -1, -1):
        period = math.prod(factor.shape[axis:])
        pieces = [array.reshape(-1, period) for array in (factor, shift)]
        if all((piece == piece[0]).all() for piece in pieces):
            return pieces[0][0], pieces[1][0]
    raise AssertionError("no period was found, not even the whole array")
