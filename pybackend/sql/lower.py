"""Translate a Keras model to a graph built from a few kinds of operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import keras

from pybackend.core.errors import InputError
from pybackend.core.model.inputs_outputs import name_inputs
from pybackend.core.words import setting, show, term
from pybackend.sql.builder import GraphBuilder, Value
from pybackend.sql.layers import lower_layer
from pybackend.sql.operations import Graph

# Arguments of calls, and values that do not change the result.
_HARMLESS = {"training": (None, False), "mask": (None,)}


def lower_model(model: Any) -> Graph:
    """Return the graph that a Sequential or functional model of Keras layers computes for one row.

    Inputs have the names of the model's inputs; outputs are in the model's order. An `InputError`
    names the layer that cannot be translated, or the reason.
    """
    if not getattr(model, "inputs", None):
        raise InputError(
            "`model` cannot be converted to SQL: its class runs its own code, or its input's "
            f"shape is not known. Models of {term('keras.Sequential')} and "
            f"{term('keras.Model(inputs, outputs)')} can"
        )
    builder = GraphBuilder()
    values = []
    names = {id(tensor): name for name, tensor in name_inputs(model).items()}
    for tensor in model.inputs:
        shape, name = tuple(tensor.shape[1:]), names[id(tensor)]
        if None in shape:
            raise InputError(
                f"the model's input {show(name)} has the shape {shape}: in SQL its sizes "
                "must be known"
            )
        if "int" not in tensor.dtype and tensor.dtype not in ("float32", "float64", "bool"):
            raise InputError(
                f"the model's input {show(name)} has the dtype {tensor.dtype}: SQL does not "
                "round features to it. Inputs of float32, float64, integers and bool can be "
                "converted"
            )
        values.append(Value(builder.graph.add_input(name, math.prod(shape)), shape))
    outputs = _call(builder, model, values)
    builder.graph.outputs = tuple(value.name for value in outputs)
    return builder.graph


def add_probabilities(model: Any) -> Any:
    """Add a softmax to the only output of a model; a sigmoid if the output is one number."""
    (output,) = model.outputs
    activation = "sigmoid" if tuple(output.shape[1:]) == (1,) else "softmax"
    # A Sequential has `input` only once it has been called.
    inputs = model.inputs[0] if len(model.inputs) == 1 else model.input
    return keras.Model(inputs, keras.layers.Activation(activation)(output))


def _call(builder: GraphBuilder, model: Any, values: Sequence[Value]) -> list[Value]:
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        for layer in model.layers:
            values = _call_layer(builder, layer, values)
        return list(values)
    if getattr(type(model), "call", None) is not _functional_class().call:
        raise InputError(
            f"the model {show(model.name)} cannot be converted to SQL: its class defines its own "
            "`call`"
        )
    config = model.get_config()
    given = {tensor.name: value for tensor, value in zip(model.inputs, values, strict=True)}
    first = _histories(config["input_layers"])
    known = {key: given[model.get_layer(key[0]).output.name] for key in first}
    waiting = [
        (layer, number, node)
        for layer in config["layers"]
        for number, node in enumerate(layer["inbound_nodes"])
    ]
    while waiting:
        still = []
        for layer, number, node in waiting:
            needed = _histories(node["args"])
            if any(key not in known for key in needed):
                still.append((layer, number, node))
                continue
            found = _call_node(builder, model, layer, node, [known[key] for key in needed])
            known.update({(layer["name"], number, key): v for key, v in enumerate(found)})
        if len(still) == len(waiting):
            names = ", ".join(repr(layer["name"]) for layer, _, _ in still)
            raise InputError(f"the layers {names} take tensors that no layer returns")
        waiting = still
    # In `output_layers`, calls of a functional model are counted from 1.
    return [
        known[name, number - isinstance(model.get_layer(name), _functional_class()), key]
        for name, number, key in _histories(config["output_layers"])
    ]


def _call_node(
    builder: GraphBuilder, model: Any, described: Any, node: Any, values: Sequence[Value]
) -> list[Value]:
    name = described["name"]
    try:
        layer = model.get_layer(name)
    except ValueError:
        kind = f"{described.get('module', '')}.{described['class_name']}"
        raise InputError(
            f"the operation {show(name)} ({kind}) cannot be converted to SQL: only Keras layers can"
        ) from None
    _check_call(builder, layer, node)
    return _call_layer(builder, layer, values)


def _check_call(builder: GraphBuilder, layer: Any, node: Any) -> None:
    """Reject call arguments other than tensors."""
    builder.layer = layer
    for argument, value in node["kwargs"].items():
        is_setting = all(x is None or isinstance(x, bool) for x in keras.tree.flatten(value))
        settings = keras.tree.flatten(value) if is_setting else [value]
        if not is_setting or any(x not in _HARMLESS.get(argument, ()) for x in settings):
            shown = f"{setting(**{argument: value})}" if is_setting else f"numbers for `{argument}`"
            raise builder.refuse(f"it is called with {shown}")
    if not all(_is_of_tensors(given) for given in node["args"]):
        raise builder.refuse("it is called with constants in addition to tensors of the model")
    for given in node["args"]:
        inputs = getattr(layer, "input", None)
        if _is_mapping(given) and not (isinstance(inputs, dict) and set(inputs) == set(given)):
            raise builder.refuse("it is called with a dictionary, but has no inputs of these names")


def _is_of_tensors(given: Any) -> bool:
    """Return whether an argument in a call's description consists only of the model's tensors."""
    if isinstance(given, dict):
        return not _is_mapping(given) or all(_is_of_tensors(item) for item in given.values())
    return isinstance(given, (list, tuple)) and all(_is_of_tensors(item) for item in given)


def _is_mapping(given: Any) -> bool:
    return isinstance(given, dict) and given.get("class_name") != "__keras_tensor__"


def _call_layer(builder: GraphBuilder, layer: Any, values: Sequence[Value]) -> list[Value]:
    if isinstance(layer, keras.Model):
        return _call(builder, layer, values)
    return [lower_layer(builder, layer, values)]


@cache
def _functional_class() -> Any:
    tensor = keras.Input((1,))
    return type(keras.Model(tensor, tensor))


def _histories(value: Any) -> list[tuple[str, int, int]]:
    """Return the tensors in a part of a model's description, by layer, call and position."""
    if isinstance(value, dict):
        if value.get("class_name") == "__keras_tensor__":
            return _histories(value["config"]["keras_history"])
        # In the order in which Keras flattens them.
        return [found for _, item in sorted(value.items()) for found in _histories(item)]
    if not isinstance(value, (list, tuple)):
        return []
    if len(value) == 3 and isinstance(value[0], str) and all(type(x) is int for x in value[1:]):
        return [(value[0], value[1], value[2])]
    return [found for item in value for found in _histories(item)]
