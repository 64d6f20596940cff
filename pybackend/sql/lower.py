"""A Keras model as a graph of a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import keras

from pybackend.errors import InputError
from pybackend.sql.graph import Graph
from pybackend.sql.layers import lower_layer
from pybackend.sql.lowering import Lowering, Value, size_of

# What a call says without changing what is computed.
_HARMLESS = {"training": (None, False), "mask": (None,)}


def lower_model(model: Any) -> Graph:
    """What a model computes for one row.

    Parameters
    ----------
    model
        Sequential or functional, of layers of Keras. The graph's inputs have the names of its
        inputs, in their order, and its outputs are in the order of the model's.

    Raises
    ------
    InputError
        Names the layer, or what of the model cannot become SQL.
    """
    if not getattr(model, "inputs", None):
        raise InputError(
            "`model` cannot become SQL: its class computes by code of its own, or its input's "
            "shape is not known. Models of keras.Sequential and keras.Model(inputs, outputs) can"
        )
    lowering = Lowering()
    values = []
    for tensor in model.inputs:
        shape = tuple(tensor.shape[1:])
        if None in shape:
            raise InputError(
                f"the model's input {tensor.name!r} has the shape {shape}: in SQL its sizes must "
                "be known"
            )
        if "int" not in tensor.dtype and tensor.dtype not in ("float32", "float64", "bool"):
            raise InputError(
                f"the model's input {tensor.name!r} is of {tensor.dtype}: SQL does not round "
                "features to that. Inputs of float32 and of whole numbers can become SQL"
            )
        values.append(Value(lowering.graph.add_input(tensor.name, size_of(shape)), shape))
    outputs = _call(lowering, model, values)
    lowering.graph.outputs = tuple(value.name for value in outputs)
    return lowering.graph


def add_probabilities(model: Any) -> Any:
    """The same model with a softmax behind its only output; with a sigmoid if that is a number."""
    (output,) = model.outputs
    activation = "sigmoid" if tuple(output.shape[1:]) == (1,) else "softmax"
    # `input` of a Sequential is there only once it has been called.
    inputs = model.inputs[0] if len(model.inputs) == 1 else model.input
    return keras.Model(inputs, keras.layers.Activation(activation)(output))


def _call(lowering: Lowering, model: Any, values: Sequence[Value]) -> list[Value]:
    """What a model gives for values of its inputs."""
    if _is_sequential(model):
        for layer in model.layers:
            values = _call_layer(lowering, layer, values)
        return list(values)
    if not _is_functional(model):
        raise InputError(f"the model {model.name!r} cannot become SQL: it has a `call` of its own")
    config = model.get_config()
    given = {tensor.name: value for tensor, value in zip(model.inputs, values, strict=True)}
    known = {
        place: given[model.get_layer(place[0]).output.name]
        for place in _histories(config["input_layers"])
    }
    waiting = [
        (layer, number, node)
        for layer in config["layers"]
        for number, node in enumerate(layer["inbound_nodes"])
    ]
    while waiting:
        still = []
        for layer, number, node in waiting:
            needed = _histories(node["args"])
            if any(place not in known for place in needed):
                still.append((layer, number, node))
                continue
            found = _call_node(lowering, model, layer, node, [known[place] for place in needed])
            known.update({(layer["name"], number, place): v for place, v in enumerate(found)})
        if len(still) == len(waiting):
            names = ", ".join(repr(layer["name"]) for layer, _, _ in still)
            raise InputError(f"the layers {names} take tensors that no layer gives")
        waiting = still
    # There, calls of a functional model are counted from 1.
    return [
        known[name, number - isinstance(model.get_layer(name), _functional_class()), place]
        for name, number, place in _histories(config["output_layers"])
    ]


def _call_node(
    lowering: Lowering, model: Any, described: Any, node: Any, values: Sequence[Value]
) -> list[Value]:
    name = described["name"]
    try:
        layer = model.get_layer(name)
    except ValueError:
        kind = f"{described.get('module', '')}.{described['class_name']}"
        raise InputError(
            f"the operation {name!r} ({kind}) cannot become SQL: layers of Keras can"
        ) from None
    _check_call(lowering, layer, node)
    return _call_layer(lowering, layer, values)


def _check_call(lowering: Lowering, layer: Any, node: Any) -> None:
    """Reject what a call says beside the tensors that it takes."""
    lowering.layer = layer
    for argument, value in node["kwargs"].items():
        is_setting = all(x is None or isinstance(x, bool) for x in keras.tree.flatten(value))
        settings = keras.tree.flatten(value) if is_setting else [value]
        if not is_setting or any(x not in _HARMLESS.get(argument, ()) for x in settings):
            shown = f"{argument}={value!r}" if is_setting else f"numbers for `{argument}`"
            raise lowering.refuse(f"it is called with {shown}")
    if not all(_is_of_tensors(given) for given in node["args"]):
        raise lowering.refuse("it is called with constants beside tensors of the model")
    for given in node["args"]:
        inputs = getattr(layer, "input", None)
        if _is_mapping(given) and not (isinstance(inputs, dict) and set(inputs) == set(given)):
            raise lowering.refuse("it is called with a dictionary that its own inputs are not")


def _is_of_tensors(given: Any) -> bool:
    """Whether an argument of a call, as described, is tensors of the model and nothing else."""
    if isinstance(given, dict):
        return not _is_mapping(given) or all(_is_of_tensors(item) for item in given.values())
    return isinstance(given, (list, tuple)) and all(_is_of_tensors(item) for item in given)


def _is_mapping(given: Any) -> bool:
    return isinstance(given, dict) and given.get("class_name") != "__keras_tensor__"


def _call_layer(lowering: Lowering, layer: Any, values: Sequence[Value]) -> list[Value]:
    if isinstance(layer, keras.Model):
        return _call(lowering, layer, values)
    return [lower_layer(lowering, layer, values)]


def _is_sequential(model: Any) -> bool:
    """Whether a model computes one layer after the other, and nothing else."""
    return isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call


def _is_functional(model: Any) -> bool:
    """Whether a model computes what its layers were connected to, and nothing else."""
    return getattr(type(model), "call", None) is _functional_class().call


@cache
def _functional_class() -> Any:
    """The class of models that are made of tensors."""
    tensor = keras.Input((1,))
    return type(keras.Model(tensor, tensor))


def _histories(value: Any) -> list[tuple[str, int, int]]:
    """The tensors that a part of a model's description names, each by layer, call and place."""
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
