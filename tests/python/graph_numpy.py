"""Graphs of operations computed by numpy in float64: the reference for every SQL dialect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pybackend.sql.operations import (
    Combine,
    Concatenate,
    Fold,
    Gather,
    Graph,
    Linear,
    Lookup,
    Map,
    Reduce,
    Scale,
    Slope,
    Softmax,
)

_FUNCTIONS = {
    "celu": lambda x, a: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0) / a)),
    "elu": lambda x, a: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))),
    "exponential": np.exp,
    "gelu": lambda x: x * np.array([0.5 * math.erfc(-v / 2**0.5) for v in x]),
    "hard_sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hard_silu": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hard_tanh": lambda x: np.clip(x, -1, 1),
    "leaky_relu": lambda x, a: np.where(x > 0, x, a * x),
    "log_sigmoid": lambda x: -np.logaddexp(0, -x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "rsqrt": lambda x, a: 1 / np.sqrt(x + a),
    "selu": lambda x: 1.05070098 * np.where(x > 0, x, 1.67326324 * np.expm1(np.minimum(x, 0))),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "softsign": lambda x: x / (1 + abs(x)),
    "tanh": np.tanh,
}
_COMBINED = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


def compute(graph: Graph, inputs: Mapping[str, Any]) -> list[Any]:
    """Return the graph's outputs for the flat input arrays of one row."""
    values = {name: np.asarray(x, np.float64).ravel() for name, x in inputs.items()}
    for node in graph.nodes.values():
        if node.operation is not None:
            values[node.name] = _apply(node.operation, [values[name] for name in node.inputs])
        assert values[node.name].shape == (node.size,), node
    return [values[name] for name in graph.outputs]


def _apply(operation: Any, given: list[Any]) -> Any:
    x = given[0]
    match operation:
        case Linear(kernel, bias):
            groups, inputs, _ = kernel.shape
            return (np.einsum("pgi,gio->pgo", x.reshape(-1, groups, inputs), kernel) + bias).ravel()
        case Gather(places, fill):
            return np.where(places < 0, fill, x[places])
        case Map(function, constants):
            return _FUNCTIONS[function](x, *constants)
        case Scale(factor, shift):
            return (x.reshape(-1, factor.size) * factor + shift).ravel()
        case Slope(factor):
            rows = x.reshape(-1, factor.size)
            return np.where(rows > 0, rows, rows * factor).ravel()
        case Combine(name):
            for other in given[1:]:
                x = _COMBINED[name](x, other)
            return x
        case Concatenate():
            return np.concatenate(given)
        case Reduce(name, count):
            rows = x.reshape(-1, count)
            return rows.max(axis=1) if name == "maximum" else rows.sum(axis=1)
        case Softmax(count):
            powers = np.exp(x.reshape(-1, count) - x.reshape(-1, count).max(axis=1, keepdims=True))
            return (powers / powers.sum(axis=1, keepdims=True)).ravel()
        case Lookup(table):
            return table[x.astype(int)].ravel().astype(np.float64)
        case Fold(graph, steps, state_size, shown, keeps_all):
            state, found = np.zeros(state_size), []
            for part in x.reshape(steps, -1):
                (state,) = compute(graph, {"state": state, "part": part})
                found.append(state[:shown])
            return np.concatenate(found if keeps_all else found[-1:])
    raise AssertionError(operation)
