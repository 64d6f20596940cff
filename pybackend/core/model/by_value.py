"""Pickling of Keras objects with all of their attributes.

A Keras file holds a configuration and weights. Keras's own pickling writes such a file, too.
Everything else is lost: attributes, arguments of classes without `get_config`, flags of individual
variables, and a callback's references to a layer of the same model. Here, Keras objects are written
as their attributes, and TensorFlow's variables and tables as their values.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import cloudpickle
import keras
import tensorflow as tf

from pybackend.core.job.pickling import Pickler, pickle_value
from pybackend.core.model.view import reach

# Keras traces these when they are first needed; they are not sent.
TRACED = ("train_function", "test_function", "predict_function")
# Name of a node in a functional model: it begins with the address of a layer in this process.
_NODE = re.compile(r"(\d+)(\D.*)")
# Stack that a thread reserves; only deeply nested objects use it.
_STACK_BYTES = 512 << 20
_DEEPEST = 200_000


def pickle_objects(value: Any) -> bytes:
    """Pickle a value that holds models, layers, optimizers or callbacks.

    Raises `InputError`, which names an attribute that cannot be pickled, such as a lock.
    """
    return pickle_value(value, "the model", dump=_dump)


def unpickle_objects(content: bytes) -> Any:
    """Unpickle bytes that `pickle_objects` returned. Only for data from this job's own driver."""
    return cloudpickle.loads(content)


def take_snapshot(value: Any) -> Callable[[], Any]:
    """Return a function that returns a new copy of the value's current state on each call.

    For use in this process: the copies share classes and functions with the original.
    """
    shared: list[Any] = []
    return _Snapshot(_dump(value, lambda _: None, shared), shared)


class _Snapshot:
    """Result of `take_snapshot`; when pickled, its content becomes one for any process."""

    def __init__(self, content: bytes, shared: list[Any]) -> None:
        self._content, self._shared = content, shared

    def __call__(self) -> Any:
        return _LocalUnpickler(io.BytesIO(self._content), self._shared).load()

    def __reduce__(self) -> Any:
        return partial, (unpickle_objects, pickle_objects(self()))


def _dump(value: Any, send_code: Callable[[Any], None], shared: list[Any] | None = None) -> bytes:
    """Pickle in a thread with a large stack: each layer is pickled inside the previous one."""
    # A deep model exceeds the recursion limit, and a higher limit alone lets it
    # exceed the stack, which kills the process.
    file = io.BytesIO()
    pickler = _Pickler(file, value, send_code, shared)
    limit, stack = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    try:
        sys.setrecursionlimit(max(limit, _DEEPEST))
        with ThreadPoolExecutor(1) as executor:
            executor.submit(pickler.dump, value).result()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(stack)
    return file.getvalue()


class _Pickler(Pickler):
    """Pickler for objects that Keras would write as a file, and that TensorFlow cannot pickle.

    Within this process, ``shared`` gets the classes and functions, and numbers are written in their
    place.
    """

    def __init__(
        self, file: Any, value: Any, send_code: Callable[[Any], None], shared: list[Any] | None
    ) -> None:
        super().__init__(file, protocol=4)
        self._send_code, self._shared = send_code, shared
        self._known = {id(part): part for part in find_parts(value)}
        self._keys = {
            key: (part, name)
            for part in self._known.values()
            if isinstance(part, keras.Variable)
            for name, key in vars(part.value).items()
            if isinstance(key, str)
        }

    def persistent_id(self, value: Any) -> int | None:
        """Return the index of a class or function in ``shared``; None: the value is pickled.

        A function with a closure may hold copied objects, so it is pickled.
        """
        is_plain = isinstance(value, FunctionType) and value.__closure__ is None
        if self._shared is None or not (is_plain or isinstance(value, type)):
            return None
        self._shared.append(value)
        return len(self._shared) - 1

    def reducer_override(self, value: Any) -> Any:
        self._send_code(value)
        if isinstance(value, (type, FunctionType)):
            return super().reducer_override(value)
        if reduced := _reduce_tensorflow(value):
            return reduced
        kind = type(value)
        if isinstance(value, weakref.ref):
            return _make_reference, (value(),)
        if not _is_of_keras(kind):
            return super().reducer_override(value)
        if isinstance(value, (list, dict, set)):
            plain = next(base for base in (list, dict, set) if isinstance(value, base))
            return _make_empty, (kind,), (dict(vars(value)), plain(value)), None, None, _fill
        if not hasattr(value, "__dict__"):
            return super().reducer_override(value)
        _reject_own_state(kind)
        return _make_empty, (kind,), (self._attributes(value), ()), None, None, _fill

    def _attributes(self, value: Any) -> dict[str, Any]:
        attributes = dict(vars(value))
        # A traced function holds the graph of this process, which cannot be pickled.
        if isinstance(value, keras.Model):
            attributes |= {name: None for name in TRACED if name in attributes}
        return {name: self._free(item) for name, item in attributes.items()}

    def _free(self, item: Any) -> Any:
        """Replace keys that are addresses or names, which differ in other processes."""
        if not isinstance(item, (dict, set)) or not item:
            return item
        if all(key in self._keys for key in item):
            if isinstance(item, set):
                return _Later(_make_names, [(*self._keys[key], None) for key in item])
            return _Later(_make_named, [(*self._keys[key], each) for key, each in item.items()])
        if isinstance(item, dict):
            return item
        if any(type(key) is int and key in self._known for key in item):
            return _Later(_make_addresses, [self._known[key] for key in item if key in self._known])
        found = [_NODE.fullmatch(key) if isinstance(key, str) else None for key in item]
        nodes = [(self._known[int(n[1])], n[2]) for n in found if n and int(n[1]) in self._known]
        return _Later(_make_nodes, nodes) if len(nodes) == len(item) else item


class _LocalUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return self._shared[number]


@dataclass
class _Later:
    """Attribute made from parts only once these are complete: it has their addresses or names."""

    make: Callable[[Any], Any]
    parts: list[Any]


def _make_named(items: list[tuple[Any, str, Any]]) -> dict[Any, Any]:
    """Return a dict whose keys are names that variables have in this process."""
    return {vars(variable.value)[name]: item for variable, name, item in items}


def _make_names(items: list[tuple[Any, str, Any]]) -> set[Any]:
    return set(_make_named(items))


def _make_nodes(nodes: list[tuple[Any, str]]) -> set[str]:
    """Return names of nodes, each of which begins with the address of a layer."""
    return {f"{id(layer)}{rest}" for layer, rest in nodes}


def _make_addresses(parts: list[Any]) -> set[int]:
    """Return addresses of parts, with which Keras marks objects as visited."""
    return {id(part) for part in parts}


def _fill(value: Any, state: tuple[Mapping[str, Any], Any]) -> None:
    """Set the attributes and items of an object, without calling its own methods."""
    attributes, items = state
    for name, item in attributes.items():
        vars(value)[name] = item.make(item.parts) if isinstance(item, _Later) else item
    if isinstance(value, list):
        list.extend(value, items)
    elif isinstance(value, dict):
        dict.update(value, items)
    elif isinstance(value, set):
        set.update(value, items)


def _is_of_keras(kind: Any) -> bool:
    """Return whether a class is from Keras, or its objects are pickled by Keras's `__reduce__`."""
    by_keras = (getattr(kind.__reduce__, "__module__", None) or "").startswith("keras.")
    is_usual = kind.__reduce_ex__ is object.__reduce_ex__ and not hasattr(kind, "__getnewargs__")
    # An Enum, for example, has its own pickling.
    is_plain = kind.__reduce__ is object.__reduce__ and kind.__module__.startswith("keras.")
    return is_usual and (by_keras or is_plain)


def _reject_own_state(kind: type) -> None:
    """Reject a class that defines its objects' state itself, which may be more than attributes."""
    for base in kind.__mro__:
        is_library = base.__module__.partition(".")[0] in ("keras", "tensorflow", "builtins")
        for name in () if is_library else ("__slots__", "__getstate__", "__setstate__"):
            if name in vars(base):
                raise TypeError(f"the class {base.__qualname__} has {name}")


def _reduce_tensorflow(value: Any) -> Any:
    if isinstance(value, tf.Variable):
        if value.constraint is not None:
            raise TypeError(f"the TensorFlow variable {value.name} has a constraint")
        options = {
            "trainable": value.trainable,
            "name": value.name.partition(":")[0],
            "dtype": value.dtype.name,
            "aggregation": value.aggregation,
            "shape": value.shape.as_list() if value.shape.rank is not None else None,
        }
        return partial(tf.Variable, **options), (value.numpy(),)
    if isinstance(value, tf.Tensor) and value.dtype in (tf.resource, tf.variant):
        raise TypeError("it contains a TensorFlow lookup table, as TextVectorization does")
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return tf.constant, (value.numpy(), value.dtype.name)
    if isinstance(value, tf.DType):
        return tf.as_dtype, (value.name,)
    if isinstance(value, tf.distribute.Strategy):  # the one under which the worker unpickles
        return tf.distribute.get_strategy, ()
    if isinstance(value, tf.lookup.StaticHashTable):
        keys, values = value.export()
        return _make_table, (keys.numpy(), values.numpy(), value.default_value.numpy())
    return None


def _make_empty(kind: Any) -> Any:
    # `__init__` is not called: its arguments are not known.
    return kind.__new__(kind)


def _make_table(keys: Any, values: Any, default: Any) -> Any:
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default)


def _make_reference(value: Any) -> Callable[[], Any]:
    return (lambda: None) if value is None else weakref.ref(value)


def find_parts(value: Any) -> list[Any]:
    """Return the layers, operations, optimizers and variables of a value."""
    kinds = (keras.Operation, keras.optimizers.Optimizer)

    def find_inside(part: Any) -> Iterable[Any]:
        if isinstance(part, (list, tuple, set)):
            return part
        if isinstance(part, Mapping):
            return part.values()
        return [vars(part), getattr(part, "operations", ())] if isinstance(part, kinds) else []

    found = reach(value, find_inside)
    return [part for part in found if isinstance(part, (*kinds, keras.Variable))]
