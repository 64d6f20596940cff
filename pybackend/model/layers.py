"""What a model is made of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras


def find_layers(model: Any) -> list[Any]:
    """A model's layers, and those that they keep inside in any attribute."""
    found: dict[int, Any] = {id(model): model}
    waiting = [model]
    while waiting:
        for leaf in flatten(list(vars(waiting.pop()).values())):
            if isinstance(leaf, keras.layers.Layer) and id(leaf) not in found:
                found[id(leaf)] = leaf
                waiting.append(leaf)
    del found[id(model)]
    return list(found.values())


def find_custom_objects(model: Any) -> dict[str, Any]:
    """Classes and functions in a model that are not Keras's, by name."""
    parts = [model, *find_layers(model), *flatten(getattr(model, "loss", None))]
    kinds = [part if inspect.isfunction(part) else type(part) for part in parts]
    return {
        kind.__name__: kind
        for kind in kinds
        if not kind.__module__.startswith(("keras.", "builtins", "tensorflow."))
        and kind.__name__.isidentifier()
    }


def flatten(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts; None is not a leaf."""
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in flatten(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [] if value is None else [value]
