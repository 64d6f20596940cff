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
    """Classes and functions that a model consists of and that are not Keras's, by name.

    Those of layers, losses, metrics, optimizers, schedules, regularizers, constraints,
    initializers and activations.
    """
    kinds = [part if inspect.isfunction(part) else type(part) for part in _find_parts(model)]
    return {
        kind.__name__: kind
        for kind in kinds
        if not kind.__module__.startswith(("keras.", "builtins", "tensorflow.", "numpy"))
        and kind.__name__.isidentifier()
    }


def _find_parts(model: Any) -> list[Any]:
    """Functions and objects that a model and its compile settings consist of."""
    found: dict[int, Any] = {}
    waiting = [model, *flatten(getattr(model, "loss", None))]
    while waiting:
        part = waiting.pop()
        is_ours = inspect.isfunction(part) or callable(part) or _is_of_keras(type(part))
        if id(part) in found or inspect.isclass(part) or not is_ours:
            continue
        found[id(part)] = part
        if _is_of_keras(type(part)):
            waiting += flatten(list(vars(part).values()))
    return list(found.values())


def _is_of_keras(kind: type) -> bool:
    """Whether a class is one of Keras, or is derived from one."""
    return any(base.__module__.startswith("keras.") for base in kind.__mro__) and hasattr(
        kind, "__dict__"
    )


def flatten(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts; None is not a leaf."""
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in flatten(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [] if value is None else [value]
