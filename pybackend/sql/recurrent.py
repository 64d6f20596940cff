"""Translate recurrent layers: their cells, applied to one step of a sequence at a time."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from pybackend.core.words import setting
from pybackend.sql.graph import Fold
from pybackend.sql.lowering import Lowering, Value, check_layer, numbers_of, places_of

_MERGES = {"sum": "add", "mul": "multiply", "ave": "add"}


def lower_recurrent(lowering: Lowering, layer: Any, value: Value) -> Value:
    """Add a GRU, an LSTM or a SimpleRNN to the graph."""
    return _run(lowering, layer, value)


def lower_bidirectional(lowering: Lowering, layer: Any, value: Value) -> Value:
    """Add a Bidirectional recurrent layer to the graph."""
    for inner in (layer.forward_layer, layer.backward_layer):
        if type(inner).__name__ not in _CELLS:
            raise lowering.refuse(
                f"it wraps {type(inner).__name__}: only GRU, LSTM and SimpleRNN are supported"
            )
        check_layer(lowering, inner)
    both = [_run(lowering, layer.forward_layer, value), _run(lowering, layer.backward_layer, value)]
    if layer.backward_layer.return_sequences:
        both[1] = lowering.gather(both[1], places_of(both[1].shape)[::-1])
    if layer.merge_mode == "concat":
        return lowering.concatenate(both, len(both[0].shape) - 1)
    if layer.merge_mode not in _MERGES:
        raise lowering.refuse(setting(merge_mode=layer.merge_mode))
    merged = lowering.combine(_MERGES[layer.merge_mode], both)
    return lowering.scale(merged, 0.5, 0.0) if layer.merge_mode == "ave" else merged


def _run(lowering: Lowering, layer: Any, value: Value) -> Value:
    if getattr(layer, "recurrent_activation", None) is keras.activations.softmax:
        raise lowering.refuse(setting(recurrent_activation="softmax"))
    for option in ("return_state", "stateful"):
        if getattr(layer, option):
            raise lowering.refuse(f"{setting(**{option: True})}")
    steps, _ = value.shape
    if layer.go_backwards:
        value = lowering.gather(value, places_of(value.shape)[::-1])
    cell = layer.cell
    kernel = numbers_of(cell.kernel)
    bias, inner_bias = _split_bias(cell)
    # Projections of the inputs are computed for all steps at once.
    projected = lowering.linear(value, kernel, bias, (steps, kernel.shape[1]))
    inner = Lowering()
    inner.layer = lowering.layer
    states = 2 if hasattr(cell, "recurrent_activation") and not _is_gru(cell) else 1
    state = Value(inner.graph.add_input("state", states * cell.units), (states * cell.units,))
    part = Value(inner.graph.add_input("part", kernel.shape[1]), (kernel.shape[1],))
    found = _CELLS[type(layer).__name__](inner, cell, state, part, inner_bias)
    inner.graph.outputs = (found.name,)
    fold = Fold(inner.graph, steps, state.size, cell.units, layer.return_sequences)
    shape = (steps, cell.units) if layer.return_sequences else (cell.units,)
    return lowering.add(fold, [projected], shape)


def _is_gru(cell: Any) -> bool:
    return hasattr(cell, "reset_after")


def _split_bias(cell: Any) -> tuple[Any, Any]:
    """Return the biases of the inputs and of the state."""
    if not cell.use_bias:
        return None, None
    bias = numbers_of(cell.bias)
    return (bias[0], bias[1]) if bias.ndim == 2 else (bias, None)


def _slice(lowering: Lowering, value: Value, number: int, units: int, count: int = 1) -> Value:
    start = number * units
    return lowering.gather(value, np.arange(start, start + count * units))


def _gru(lowering: Lowering, cell: Any, state: Value, part: Value, bias: Any) -> Value:
    units = cell.units
    recurrent = numbers_of(cell.recurrent_kernel)
    if cell.reset_after:
        hidden = lowering.linear(state, recurrent, bias, (3 * units,))
        gates = _slice(lowering, hidden, 0, units, 2)
    else:
        gates = lowering.linear(state, recurrent[:, : 2 * units], None, (2 * units,))
    gates = lowering.combine("add", [_slice(lowering, part, 0, units, 2), gates])
    gates = lowering.activate(gates, cell.recurrent_activation)
    update, reset = (_slice(lowering, gates, number, units) for number in (0, 1))
    if cell.reset_after:
        kept = lowering.combine("multiply", [reset, _slice(lowering, hidden, 2, units)])
    else:
        kept = lowering.combine("multiply", [reset, state])
        kept = lowering.linear(kept, recurrent[:, 2 * units :], None, (units,))
    candidate = lowering.combine("add", [_slice(lowering, part, 2, units), kept])
    candidate = lowering.activate(candidate, cell.activation)
    # update * state + (1 - update) * candidate
    change = lowering.combine("subtract", [state, candidate])
    return lowering.combine("add", [candidate, lowering.combine("multiply", [update, change])])


def _lstm(lowering: Lowering, cell: Any, state: Value, part: Value, bias: Any) -> Value:
    units = cell.units
    hidden, carried = (_slice(lowering, state, number, units) for number in (0, 1))
    recurrent = numbers_of(cell.recurrent_kernel)
    gates = lowering.linear(hidden, recurrent, None, (4 * units,))
    gates = lowering.combine("add", [part, gates])
    opened = lowering.activate(gates, cell.recurrent_activation)
    enters, forgets, shows = (_slice(lowering, opened, number, units) for number in (0, 1, 3))
    new = lowering.activate(_slice(lowering, gates, 2, units), cell.activation)
    kept = lowering.combine("multiply", [forgets, carried])
    carried = lowering.combine("add", [kept, lowering.combine("multiply", [enters, new])])
    shown = lowering.activate(carried, cell.activation)
    hidden = lowering.combine("multiply", [shows, shown])
    return lowering.concatenate([hidden, carried], 0)


def _simple(lowering: Lowering, cell: Any, state: Value, part: Value, bias: Any) -> Value:
    recurrent = numbers_of(cell.recurrent_kernel)
    hidden = lowering.linear(state, recurrent, None, (cell.units,))
    return lowering.activate(lowering.combine("add", [part, hidden]), cell.activation)


_CELLS = {"GRU": _gru, "LSTM": _lstm, "SimpleRNN": _simple}
