"""Compare a copy of a model with the original, by its parts and its outputs."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.model.by_value import TRACED
from pybackend.core.model.view import (
    ModelView,
    find_replaced_methods,
    flatten,
    is_custom,
    is_defined_by_user,
    reach,
)
from pybackend.core.words import setting, show

Kind = Literal["train", "evaluate", "predict", "run"]
# Only values of these types are compared directly.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)
_MOST = 5
# Maximum depth to which other values are compared.
_DEEPEST = 8
_NUMBER = re.compile(r"_\d+$")
# What Keras sets on objects by itself: names, and the state of their use.
_OF_USE = {"built", "name", "stop_training", "stop_evaluating", "stop_predicting", *TRACED}
# Methods of Keras's layers by which `adapt` works; training and prediction never call them.
_ADAPTING = {"adapt", "update_state", "finalize_state", "reset_state"}
_STORING = {"__init__", "load_own_variables", "save_own_variables"}


def find_differences(view: ModelView, copied: ModelView, kind: Kind = "train") -> list[str]:
    """List how a copy of a model differs, in words that complete a sentence like "it loses ...".

    Classes, plain attributes of layers and of instances of user-defined classes, and compile
    settings are compared; for training, also the optimizer and variables (shape, type, trainable,
    value). Predictions need no loss, and merged weights give the same predictions.
    """
    model, copy = view.model, copied.model
    if type(model) is not type(copy):
        return [f"the class {type(model).__name__}"]
    found = _compare_layers(view, copied)
    if kind != "predict" and not found:
        found = _compare_compile_settings(model, copy) + _compare_custom_parts(view, copied)
    if kind == "train" and not found:
        found = compare_variables("weights", model.variables, copy.variables)
        found += _compare_optimizers(model, copy)
    if len(found) > _MOST:
        found = [*found[:_MOST], f"and {len(found) - _MOST} more"]
    return found


def hash_weights(model: Any) -> str:
    """Return the SHA-256 of all weights: equal for two models only if these are bitwise equal."""
    return _hash(model.weights)


def digest_start(model: Any, with_optimizer: bool = True) -> dict[str, str]:
    """Return digests of what a training run starts with: the weights and the optimizer's state.

    An optimizer that is not built has no state.
    """
    digests = {"weights": hash_weights(model)}
    if with_optimizer and model.optimizer is not None and model.optimizer.built:
        digests["optimizer's state"] = _hash(model.optimizer.variables)
    return digests


def _hash(variables: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()


def is_random_state(variable: Any) -> bool:
    """Return whether a variable is the state of a generator, which workers seed for training."""
    return str(variable.path).endswith("seed_generator_state")


def _compare_layers(view: ModelView, copied: ModelView) -> list[str]:
    # Without those that a Sequential creates and renames.
    own, others = (
        [one for one in each.parts if one is each.model or type(one).__name__ != "Functional"]
        for each in (view, copied)
    )
    if sorted(map(_name_of, own)) == sorted(map(_name_of, others)):
        own, others = sorted(own, key=_name_of), sorted(others, key=_name_of)
    # Else a class has created its layers again, in the same order, and Keras has renamed them.
    if list(map(type, own)) != list(map(type, others)):
        return [f"layers: {len(own) - 1} became {len(others) - 1}, or have different classes"]
    found = []
    for one, other in zip(own, others, strict=True):
        what = f"{type(one).__name__} {show(one.name)}"
        replaced = set(find_replaced_methods(one)) ^ set(find_replaced_methods(other))
        found += [f"{what}: its {name}()" for name in sorted(replaced)]
        found += _compare_settings(what, one, other, False)
    return found


def compare_variables(what: str, own: Any, others: Any) -> list[str]:
    """List the variables that differ in shape, type, value, or in being trainable."""
    if len(own) != len(others):
        return [f"{what}: {len(own)} variables became {len(others)}"]
    found = []
    for one, other in zip(own, others, strict=True):
        if tuple(one.shape) != tuple(other.shape) or one.dtype != other.dtype:
            found.append(f"the shape or type of {one.path}")
        elif one.trainable != other.trainable:
            found.append(f"{one.path}.trainable={one.trainable}")
        elif not _is_equal(one.numpy(), other.numpy()) and not is_random_state(one):
            found.append(f"the values of {one.path}")
    return found


def _compare_optimizers(model: Any, copy: Any) -> list[str]:
    own, other = getattr(model, "optimizer", None), getattr(copy, "optimizer", None)
    if own is None or other is None:
        return [] if own is other else ["the optimizer"]
    if type(own).__name__ != type(other).__name__:
        return [f"the optimizer's class {type(own).__name__}"]
    found = _compare_settings(f"the optimizer {type(own).__name__}", own, other, True)
    if own.built and not found:
        found = compare_variables("the optimizer's state", own.variables, other.variables)
    elif other.built and not found and _starts_from_weights(own):
        # A file's optimizer is built before the weights are read.
        found = [f"the state of the optimizer {type(own).__name__}, which starts from the weights"]
    return found


def _starts_from_weights(optimizer: Any) -> bool:
    """Return whether the state of an optimizer depends on the weights that it is built with."""
    value = 0.3714
    try:
        fresh = type(optimizer).from_config(optimizer.get_config())
        fresh.build([keras.Variable(np.full((2, 2), value, "float32"), name="kernel")])
        return any(np.any(np.isclose(v.numpy(), value, atol=0)) for v in fresh.variables if v.shape)
    except Exception:  # it needs certain variables; its results are compared elsewhere
        return False


def _compare_compile_settings(model: Any, copy: Any) -> list[str]:
    if model.compiled != copy.compiled:
        return ["how it was compiled"]
    own, others = _compile_config(model), _compile_config(copy)
    found = [] if own == others else ["how it was compiled"]
    # A configuration of Keras may lack something: that of Huber lacks its delta.
    losses = zip(flatten(model.loss), flatten(copy.loss), strict=False)
    for one, other in losses:
        if isinstance(one, keras.losses.Loss) and not _is_alike(vars(one), vars(other)):
            found.append(f"the loss {one.name}: {vars(one)}")
    return found


def _compile_config(model: Any) -> Any:
    """Return Keras's configuration of its own `compile()`, whose objects have been compared."""
    if not model.compiled or is_custom(type(model).compile):
        return None
    try:
        # Keras drops the optimizer when it writes HDF5; the optimizer is compared separately.
        config = {**(model.get_compile_config() or {}), "optimizer": None}
        return json.dumps(config, sort_keys=True, default=str)
    except Exception:  # Keras cannot write it, so no file of it was sent
        return None


def _compare_custom_parts(view: ModelView, copied: ModelView) -> list[str]:
    """Compare the settings of user-defined losses, metrics, constraints and the like."""
    own, others = _sort_custom_parts(view), _sort_custom_parts(copied)
    if list(map(type, own)) != list(map(type, others)):
        return [f"its own {name}" for name in dict.fromkeys(type(part).__name__ for part in own)]
    return [
        difference
        for one, other in zip(own, others, strict=True)
        for difference in _compare_settings(type(one).__name__, one, other, True)
    ]


def _sort_custom_parts(view: ModelView) -> list[Any]:
    """Return user-defined parts in an order that differs only if their settings differ."""
    parts = [
        part
        for part in view.custom_parts
        if not isinstance(part, keras.layers.Layer) and not inspect.isfunction(part)
    ]
    return sorted(parts, key=lambda part: (type(part).__name__, repr(_plain(part, True))))


def _compare_settings(what: str, one: Any, other: Any, with_private: bool) -> list[str]:
    """List the attributes that differ; private ones of layers are internal to Keras."""
    if not hasattr(one, "__dict__") or not hasattr(other, "__dict__"):
        return []
    kind: Any = type(one)
    own, others = _plain(one, with_private), _plain(other, with_private)
    found = [
        f"{what}: {setting(**{name: value})}"
        for name, value in own.items()
        if name not in vars(other) or (name in others and not _is_alike(value, others[name]))
        if _is_used(kind, name)
    ]
    if not is_custom(one):
        return found
    # Other values, if the user-defined class names them.
    shown = sorted(name for name in _names_in(kind) if name in vars(one) and name not in own)
    return found + [
        f"{what}: {name}"
        for name in shown
        if (name in vars(other) and not _is_alike(vars(one)[name], vars(other)[name]))
        or (name not in vars(other) and _has_state(vars(one)[name]))
    ]


def _has_state(value: Any) -> bool:
    """Return whether an attribute that a copy lacks is more than a cache filled on first use."""
    return isinstance(value, tf.Variable | tf.random.Generator | tf.Module) or (
        hasattr(value, "__dict__") and not callable(value) and is_custom(value)
    )


def _is_alike(one: Any, other: Any, depth: int = 0) -> bool:
    """Return whether two values of any kind are equal, as far as can be determined."""
    if one is other:
        return True
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        alike = (_is_alike(a, b, depth + 1) for a, b in zip(one, other, strict=False))
        return len(one) == len(other) and all(alike)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        alike = (_is_alike(one[key], other[key], depth + 1) for key in one)
        return one.keys() == other.keys() and all(alike)
    if isinstance(one, (tf.Tensor, tf.Variable)) and isinstance(other, (tf.Tensor, tf.Variable)):
        return not hasattr(one, "numpy") or _is_alike(one.numpy(), other.numpy())
    if isinstance(one, _PLAIN) or isinstance(other, _PLAIN):
        return _is_equal(one, other)
    if depth > _DEEPEST:
        return True
    if inspect.isfunction(one) and inspect.isfunction(other):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        return one.__code__ == other.__code__ and _is_alike(cells[0], cells[1], depth + 1)
    if type(one) is not type(other):
        return False
    if not is_custom(one) or isinstance(one, (keras.layers.Layer, keras.Variable)):
        return True  # compared elsewhere, or by its configuration
    return _is_alike(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}), depth + 1)


def _plain(part: Any, with_private: bool) -> dict[str, Any]:
    """Return the attributes that are numbers, text, or lists, sets or dicts of them.

    This excludes attributes that Keras sets: private dicts, and all private attributes of a layer
    that the user-defined class does not mention.
    """
    kind: Any = type(part)
    named = _names_in(kind)

    def counts(name: str, value: Any) -> bool:
        if name in named:
            return True
        if not name.startswith("_"):
            return name not in _OF_USE
        return with_private and not isinstance(value, Mapping)

    plain = {
        name: _list_set(value) if isinstance(value, (set, frozenset)) else value
        for name, value in vars(part).items()
        if counts(name, value)
    }
    return {name: value for name, value in plain.items() if _is_plain(value)}


@lru_cache
def _names_in(kind: Any) -> frozenset[str]:
    bases = [base for base in kind.__mro__ if is_defined_by_user(base)]
    return frozenset(_read_names((base, name) for base in bases for name in vars(base)) - _OF_USE)


@lru_cache
def _is_used(kind: Any, name: str) -> bool:
    """Return whether a layer computes with an attribute, and not only in Keras's `adapt`."""
    bases = [base for base in kind.__mro__ if base not in keras.layers.Layer.__mro__]
    by_keras = [base for base in bases if hasattr(base, "adapt") and not is_defined_by_user(base)]
    adapting = [(base, method) for base in by_keras for method in _ADAPTING & vars(base).keys()]
    others = [(base, m) for base in bases for m in vars(base).keys() - _ADAPTING - _STORING]
    return name not in _read_names(adapting) or name in _read_names(others)


def _read_names(methods: Iterable[tuple[type, str]]) -> set[str]:
    """Return the names of attributes in the methods of these classes."""
    members = [
        getattr(member, "fget", None) or getattr(member, "__func__", member)
        for member in (vars(kind)[name] for kind, name in methods)
    ]
    return {
        name
        for member in members
        if inspect.isfunction(member)
        for code in reach(member.__code__, lambda code: filter(inspect.iscode, code.co_consts))
        for name in code.co_names
    }


def _list_set(value: Any) -> list[Any]:
    """Return a set as a list, without the numbers that TensorFlow appends to variable names."""
    return sorted((_NUMBER.sub("", v) if isinstance(v, str) else v for v in value), key=repr)


def _is_plain(value: Any) -> bool:
    return all(isinstance(leaf, _PLAIN) for leaf in flatten(value))


def _name_of(part: Any) -> str:
    return f"{type(part).__name__} {getattr(part, 'name', '')}"


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, (np.ndarray, np.generic)) or isinstance(other, (np.ndarray, np.generic)):
        one, other = np.asarray(one), np.asarray(other)
        kinds = "fc" if one.dtype.kind in "fc" and other.dtype.kind in "fc" else ""
        return bool(np.array_equal(one, other, equal_nan=bool(kinds)))
    return type(one) is type(other) and bool(one == other or one != one)  # NaN equals NaN


def find_other_behavior(view: ModelView, copy: Any, rows: Any) -> list[str]:
    """Describe how a copy of a model computes differently, in words that complete "it loses ...".

    The training loss and its gradients are compared if the model is built and has user-defined
    parts; Keras's own parts are determined by their configuration. Random results are not compared.
    Rows are ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
    """
    model = view.model
    if not (model.built and copy.built and view.custom_parts):
        return []
    # Keras's own random layers draw the same numbers from the same states.
    states = [v for v in copy.variables if is_random_state(v)]
    for state, own in zip(states, filter(is_random_state, model.variables), strict=False):
        state.assign(own)
    try:
        # Twice: results that differ by themselves are random.
        own, again = _compute_gradients(model, rows), _compute_gradients(model, rows)
    except Exception:  # rows that do not fit are reported later
        return []
    if not _is_close(own, again):
        return []
    try:
        others = _compute_gradients(copy, rows)
    except Exception as error:
        return [f"something without which it fails ({error})"]
    return [] if _is_close(own, others) else ["something that changes its loss or gradients"]


@contextmanager
def keep_state(model: Any) -> Iterator[None]:
    """Restore a model's variables and the random states of Python and numpy at the end."""
    # A view of its own: a first call of the model creates variables.
    values = [(variable, variable.numpy()) for variable in ModelView(model).list_variables()]
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
        random.setstate(states[0])
        np.random.set_state(states[1])


def compute_loss(model: Any, rows: Any, y_pred: Any, training: bool) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(rows)
    arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
    if "training" in inspect.signature(model.compute_loss).parameters:
        arguments["training"] = training
    return model.compute_loss(**arguments)


def _compute_gradients(model: Any, rows: Any) -> list[Any]:
    variables = [v.value for v in model.trainable_variables]
    with keep_state(model):
        with tf.GradientTape() as tape:
            x = keras.utils.unpack_x_y_sample_weight(rows)[0]
            loss = compute_loss(model, rows, model(x, training=True), True)
        gradients = tape.gradient(loss, variables)
    found = [loss, *(gradient for gradient in gradients if gradient is not None)]
    return [keras.ops.convert_to_numpy(each) for each in found]


def _is_close(own: list[Any], others: list[Any]) -> bool:
    return len(own) == len(others) and all(
        one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
        for one, other in zip(own, others, strict=True)
    )
