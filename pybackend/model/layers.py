"""Parts of a model: layers, optimizers, metrics, variables, custom objects."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import keras
import tensorflow as tf

_LIBRARIES = {"keras", "numpy", "tensorflow"}


def find_layers(model: Any) -> list[Any]:
    """Return a model's layers, and the layers that these hold in any attribute."""
    found: dict[int, Any] = {id(model): model}
    waiting = [model]
    while waiting:
        for leaf in flatten(list(vars(waiting.pop()).values())):
            if isinstance(leaf, keras.layers.Layer) and id(leaf) not in found:
                found[id(leaf)] = leaf
                waiting.append(leaf)
    del found[id(model)]
    return list(found.values())


def find_other_optimizers(model: Any) -> dict[str, Any]:
    """Return the optimizers that a train_step may use besides the compiled one, by attribute.

    Keras's own train_step uses none. The inner optimizer of a loss-scaling optimizer does not
    count.
    """
    if is_of_keras(type(model).train_step):
        return {}
    found: dict[int, tuple[str, Any]] = {}
    for part in [model, *find_layers(model)]:
        # TensorFlow holds all of them a second time, in an attribute of its own.
        for name, value in sorted(vars(part).items(), key=lambda item: item[0].startswith("_")):
            for number, leaf in enumerate(flatten(value)):
                if isinstance(leaf, keras.optimizers.Optimizer) and leaf is not model.optimizer:
                    found.setdefault(id(leaf), (f"{name}[{number}]" if number else name, leaf))
    for _, optimizer in [("", model.optimizer), *list(found.values())]:
        found.pop(id(getattr(optimizer, "inner_optimizer", None)), None)
    return dict(found.values())


def find_optimizers(model: Any) -> list[Any]:
    """Return all optimizers of a model, the one given to `compile` first."""
    return [model.optimizer, *find_other_optimizers(model).values()]


def is_of_keras(function: Any) -> bool:
    """Return whether a method is Keras's own, not overridden by a user-defined class."""
    return str(function.__module__).startswith("keras.")


def find_metrics(model: Any) -> list[Any]:
    """Return the metrics in all attributes of a model and its layers, not only in `metrics`."""
    leaves = [leaf for part in [model, *find_layers(model)] for leaf in flatten(vars(part))]
    return [leaf for leaf in leaves if isinstance(leaf, keras.metrics.Metric)]


def find_half_variables(model: Any) -> set[int]:
    """Return the identities of variables whose layer computes in float16."""
    types: dict[int, str] = {}
    # An inner layer has fewer variables, and its compute type decides.
    for layer in sorted(find_layers(model), key=lambda one: -len(one.variables)):
        types |= {id(v): str(layer.compute_dtype) for v in layer.variables}
    return {key for key, name in types.items() if name == "float16"}


def find_synchronized(model: Any) -> list[Any]:
    """Return the layers that normalize by the statistics of all workers' rows."""
    return [layer for layer in find_layers(model) if getattr(layer, "synchronized", False)]


def build_model(model: Any, inputs: Any) -> None:
    """Call a model, so that it creates its missing weights.

    A model without its own `call`, such as a GAN of two networks, has the weights of its layers.
    """
    if model.built and all(layer.built for layer in find_layers(model)):
        return
    if type(model).call is not keras.Model.call:
        model(inputs)
    else:
        model.built = True  # otherwise Keras writes no weights


def find_variables(model: Any, without: tuple[type, ...] = ()) -> list[Any]:
    """Return all variables of a model, its losses and metrics, including those in closures.

    From the optimizer, only scalars are included, such as its step count.

    Parameters
    ----------
    without
        Classes of objects whose variables are left out.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    optimizer = getattr(model, "optimizer", None)
    waiting = [model]
    while waiting:
        part = waiting.pop()
        if id(part) in seen or part is optimizer:
            continue
        seen.add(id(part))
        if isinstance(part, without):
            continue
        if isinstance(part, keras.Variable):
            found[id(part.value)] = part.value
        elif isinstance(part, tf.Variable):
            found[id(part)] = part
        elif isinstance(part, tf.random.Generator):
            found[id(part.state)] = part.state
        elif _derives_from_keras(type(part)) or isinstance(part, tf.Module) or _is_of_user(part):
            waiting += flatten(list(vars(part).values()))
        elif inspect.isfunction(part):
            enclosed = read_closure(part)
            waiting += [v for v in enclosed if isinstance(v, keras.Variable | tf.Variable)]
    numbers = [v.value for v in (optimizer.variables if optimizer else ()) if len(v.shape) == 0]
    return [*found.values(), *(v for v in numbers if id(v) not in found)]


def _is_of_user(part: Any) -> bool:
    """Return whether this is an instance of a user-defined class and has attributes."""
    if inspect.isclass(part) or inspect.isroutine(part) or not hasattr(part, "__dict__"):
        return False
    return is_custom(part) and not type(part).__module__.startswith("pybackend.")


def read_closure(function: Any) -> list[Any]:
    """Return the values in a function's closure."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has no value yet
            found.append(cell.cell_contents)
    return found


def find_custom_objects(model: Any) -> dict[str, Any]:
    """Return a model's classes and functions that are not Keras's, by name.

    These are layers, losses, metrics, optimizers, schedules, regularizers, constraints,
    initializers and activations.
    """
    return {kind.__name__: kind for kind in _custom_kinds(model) if kind.__name__.isidentifier()}


def find_equal_names(model: Any) -> list[str]:
    """Return names shared by user-defined classes or functions: a file stores one for each name."""
    kinds = {id(kind): kind for kind in _custom_kinds(model)}.values()
    names = [kind.__name__ for kind in kinds]
    return sorted({name for name in names if names.count(name) > 1})


def _custom_kinds(model: Any) -> list[Any]:
    return [part if inspect.isfunction(part) else type(part) for part in find_custom_parts(model)]


def find_custom_parts(model: Any) -> list[Any]:
    """Return the user-defined functions, and instances of classes, in a model and its settings."""
    found: dict[int, Any] = {}
    waiting = [model]
    while waiting:
        part = waiting.pop()
        if id(part) in found or inspect.isclass(part):
            continue
        if _derives_from_keras(type(part)):
            waiting += flatten(_own_attributes(part))
        elif not callable(part):
            continue
        found[id(part)] = part
    return [part for part in found.values() if is_custom(part)]


def find_replaced_methods(part: Any) -> list[str]:
    """Return the names of methods that an object overrides with attributes."""
    return [
        name
        for name, value in vars(part).items()
        if callable(value) and callable(getattr(type(part), name, None)) and not _is_wrapper(value)
    ]


def _own_attributes(part: Any) -> list[Any]:
    """Return the values of attributes, except for methods of its class that Keras has wrapped."""
    return [value for value in vars(part).values() if not _is_wrapper(value)]


def _is_wrapper(value: Any) -> bool:
    """Return whether this is Keras's wrapper of a layer's method, such as `build`."""
    return inspect.isfunction(value) and str(value.__globals__["__name__"]).startswith("keras.")


def is_custom(part: Any) -> bool:
    """Return whether a function, or the class of an object, is user-defined."""
    return is_defined_by_user(part if inspect.isfunction(part) else type(part))


def is_defined_by_user(kind: Any) -> bool:
    """Return whether a class or function is neither from a library nor one of our wrappers."""
    package = str(kind.__module__).partition(".")[0]
    if str(kind.__module__).startswith("pybackend.engine."):
        return False
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


def _derives_from_keras(kind: type) -> bool:
    """Return whether a class is a Keras class, or is derived from one."""
    return any(base.__module__.startswith("keras.") for base in kind.__mro__) and hasattr(
        kind, "__dict__"
    )


def flatten(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts; None is not a leaf."""
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in flatten(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [] if value is None else [value]
