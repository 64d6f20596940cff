"""What a model is made of."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import keras

_LIBRARIES = {"keras", "numpy", "tensorflow"}


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
    kinds = [part if inspect.isfunction(part) else type(part) for part in find_custom_parts(model)]
    return {kind.__name__: kind for kind in kinds if kind.__name__.isidentifier()}


def find_custom_parts(model: Any) -> list[Any]:
    """Functions, and objects of classes, that are not Keras's, in a model and its settings."""
    found: dict[int, Any] = {}
    waiting = [model]
    while waiting:
        part = waiting.pop()
        if id(part) in found or inspect.isclass(part):
            continue
        if _is_of_keras(type(part)):
            waiting += flatten(_own_attributes(part))
        elif not callable(part):
            continue
        found[id(part)] = part
    return [part for part in found.values() if is_custom(part)]


def _own_attributes(part: Any) -> list[Any]:
    """Values of attributes, but for the methods of its class that Keras has wrapped."""
    kind = type(part)
    return [v for name, v in vars(part).items() if not callable(getattr(kind, name, None))]


def is_custom(part: Any) -> bool:
    """Whether a function, or the class of an object, is the user's."""
    kind = part if inspect.isfunction(part) else type(part)
    package = str(kind.__module__).partition(".")[0]
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


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
