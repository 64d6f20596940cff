"""Keras objects pickled by value: as they are, with all that was set on them.

Keras's files, and its own pickling, which writes such a file, hold a configuration and weights. All
else is lost there: attributes, arguments of classes without `get_config`, flags of single
variables, and that a callback holds a layer of the very model. Here objects of Keras are written as
their attributes, and TensorFlow's variables and tables as their values.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any

import cloudpickle
import keras
import tensorflow as tf

from pybackend.errors import InputError
from pybackend.job.pickling import Pickler, is_sent, sending_code
from pybackend.job.unpicklable import explain_failure

# Traced by Keras when they are first needed, and not to be sent.
_TRACED = ("train_function", "test_function", "predict_function")
# How a functional model names its nodes: by the address of a layer, which is another one elsewhere.
_NODE = re.compile(r"(\d+)(\D.*)")
# Memory that a thread reserves and does not use but for what is deep.
_STACK_BYTES = 512 << 20
_DEEPEST = 200_000


def pickle_objects(value: Any) -> bytes:
    """Pickle a value that holds models, layers, optimizers or callbacks.

    Raises
    ------
    InputError
        Names the attribute that cannot be pickled, such as a lock or an open file.
    """
    with sending_code() as send_code:

        def pickled(part: Any) -> bytes:
            file = io.BytesIO()
            _dump(_Pickler(file, part, send_code), part)
            return file.getvalue()

        try:
            return pickled(value)
        except Exception as error:
            what = "the model"
            raise InputError(explain_failure(value, what, pickled, error, is_sent)) from error


def unpickle_objects(content: bytes) -> Any:
    """What `pickle_objects` wrote. Only for what this job's own driver has sent."""
    return cloudpickle.loads(content)


def take_snapshot(value: Any) -> Callable[[], Any]:
    """A function that returns a new copy of a value, as it is now, whenever it is called.

    For this process: copies share classes and functions with the original, which stay as they are.
    """
    file = io.BytesIO()
    pickler = _LocalPickler(file, value, lambda _: None)
    _dump(pickler, value)
    return _Snapshot(file.getvalue(), pickler.shared)


class _Snapshot:
    """What `take_snapshot` returns; pickled, it is a `_Copies`, for any process."""

    def __init__(self, content: bytes, shared: list[Any]) -> None:
        self._content = content
        self._shared = shared

    def __call__(self) -> Any:
        return _LocalUnpickler(io.BytesIO(self._content), self._shared).load()

    def __reduce__(self) -> Any:
        return _Copies, (pickle_objects(self()),)


class _Copies:
    """Returns a new copy of a value whenever it is called."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __call__(self) -> Any:
        return unpickle_objects(self._content)


def _dump(pickler: _Pickler, value: Any) -> None:
    """Pickle in a thread with a large stack: a layer is pickled inside of the one before it."""
    limit, stack = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    try:
        sys.setrecursionlimit(max(limit, _DEEPEST))
        with ThreadPoolExecutor(1) as executor:
            executor.submit(pickler.dump, value).result()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(stack)


class _Pickler(Pickler):
    """Writes what Keras would write as a file, and TensorFlow not at all."""

    def __init__(self, file: io.BytesIO, value: Any, send_code: Callable[[Any], None]) -> None:
        super().__init__(file, protocol=4)
        self._send_code = send_code
        self._known = {id(part): part for part in _find_parts(value)}
        self._keys = {
            key: (part, name)
            for part in self._known.values()
            if isinstance(part, keras.Variable)
            for name, key in _texts(part.value)
        }

    def reducer_override(self, value: Any) -> Any:
        """How cloudpickle is to write a value; NotImplemented: as it does."""
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
        if isinstance(value, keras.Model):
            attributes |= {name: None for name in _TRACED if name in attributes}
        return {name: self._free(item) for name, item in attributes.items()}

    def _free(self, item: Any) -> Any:
        """An attribute whose keys are addresses or names that will be others there."""
        if isinstance(item, dict) and item and all(key in self._keys for key in item):
            return _Renamed([(*self._keys[key], each) for key, each in item.items()])
        if isinstance(item, set) and item and all(key in self._keys for key in item):
            return _Renamed([(*self._keys[key], None) for key in item], is_set=True)
        if isinstance(item, set) and any(type(key) is int and key in self._known for key in item):
            return _Addresses([self._known[key] for key in item if key in self._known])
        if isinstance(item, set) and item:
            found = [_NODE.fullmatch(key) if isinstance(key, str) else None for key in item]
            nodes = [
                (self._known[int(n[1])], n[2]) for n in found if n and int(n[1]) in self._known
            ]
            if len(nodes) == len(item):
                return _Nodes(nodes)
        return item


class _LocalPickler(_Pickler):
    """Writes the number of a class or function, and keeps it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shared: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        """The number, if there is one. A function with a closure may hold what is copied."""
        is_plain = isinstance(value, FunctionType) and value.__closure__ is None
        if not is_plain and not isinstance(value, type):
            return None
        self.shared.append(value)
        return len(self.shared) - 1


class _LocalUnpickler(pickle.Unpickler):
    """Reads what `_LocalPickler` has written in this process."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        """The class or function of a number."""
        return self._shared[number]


class _Renamed:
    """A dict or set by the names that variables have in their own process."""

    def __init__(self, items: list[tuple[Any, str, Any]], is_set: bool = False) -> None:
        self._items = items
        self._is_set = is_set

    def restore(self) -> dict[Any, Any] | set[Any]:
        found = {vars(variable.value)[name]: item for variable, name, item in self._items}
        return set(found) if self._is_set else found


class _Nodes:
    """A set of the names of nodes, which begin with the address of a layer."""

    def __init__(self, nodes: list[tuple[Any, str]]) -> None:
        self._nodes = nodes

    def restore(self) -> set[str]:
        return {f"{id(layer)}{rest}" for layer, rest in self._nodes}


class _Addresses:
    """A set of the addresses of parts, by which Keras knows what it has seen."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def restore(self) -> set[int]:
        return {id(part) for part in self._parts}


def _fill(value: Any, state: tuple[Mapping[str, Any], Any]) -> None:
    """Give an object its attributes and items, without a method of its own being called."""
    attributes, items = state
    vars(value).update(
        {
            name: item.restore() if isinstance(item, (_Renamed, _Nodes, _Addresses)) else item
            for name, item in attributes.items()
        }
    )
    if isinstance(value, list):
        list.extend(value, items)
    elif isinstance(value, dict):
        dict.update(value, items)
    elif isinstance(value, set):
        set.update(value, items)


def _is_of_keras(kind: Any) -> bool:
    """Whether objects of a class are Keras's, or would be written as Keras writes its own."""
    by_keras = (getattr(kind.__reduce__, "__module__", None) or "").startswith("keras.")
    is_usual = kind.__reduce_ex__ is object.__reduce_ex__ and not hasattr(kind, "__getnewargs__")
    return is_usual and (by_keras or (_is_plain(kind) and kind.__module__.startswith("keras.")))


def _reject_own_state(kind: type) -> None:
    """A class that says itself what its objects' state is means more than its attributes."""
    for base in kind.__mro__:
        is_library = base.__module__.partition(".")[0] in ("keras", "tensorflow", "builtins")
        for name in () if is_library else ("__slots__", "__getstate__", "__setstate__"):
            if name in vars(base):
                raise TypeError(f"the class {base.__qualname__} has {name}")


def _is_plain(kind: Any) -> bool:
    """Whether a class leaves pickling to Python: an Enum, for one, does not."""
    return kind.__reduce__ is object.__reduce__


def _reduce_tensorflow(value: Any) -> Any:
    if isinstance(value, tf.Variable):
        if value.constraint is not None:
            raise TypeError(f"the variable {value.name} of TensorFlow has a constraint")
        options = {
            "trainable": value.trainable,
            "name": value.name.partition(":")[0],
            "dtype": value.dtype.name,
            "aggregation": value.aggregation,
            "shape": value.shape.as_list() if value.shape.rank is not None else None,
        }
        return _make_variable, (value.numpy(), options)
    if isinstance(value, tf.Tensor) and value.dtype in (tf.resource, tf.variant):
        raise TypeError("it holds a table of TensorFlow, as TextVectorization does")
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return tf.constant, (value.numpy(), value.dtype.name)
    if isinstance(value, tf.DType):
        return tf.as_dtype, (value.name,)
    if isinstance(value, tf.distribute.Strategy):
        return tf.distribute.get_strategy, ()
    if isinstance(value, tf.lookup.StaticHashTable):
        keys, values = value.export()
        return _make_table, (keys.numpy(), values.numpy(), value.default_value.numpy())
    return None


def _make_empty(kind: Any) -> Any:
    """An object without attributes: its class's `__init__` is not called."""
    return kind.__new__(kind)


def _make_variable(content: Any, options: Mapping[str, Any]) -> Any:
    return tf.Variable(content, **options)


def _make_table(keys: Any, values: Any, default: Any) -> Any:
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default)


def _make_reference(value: Any) -> Callable[[], Any]:
    return (lambda: None) if value is None else weakref.ref(value)


def _texts(variable: Any) -> Iterator[tuple[str, str]]:
    return ((name, item) for name, item in vars(variable).items() if isinstance(item, str))


def _find_parts(value: Any) -> Iterator[Any]:
    """Layers, operations and variables that a value consists of."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (list, tuple, set)):
            waiting.extend(part)
        elif isinstance(part, Mapping):
            waiting.extend(part.values())
        elif isinstance(part, keras.Variable):
            yield part
        elif isinstance(part, (keras.Operation, keras.optimizers.Optimizer)):
            yield part
            waiting += [vars(part), getattr(part, "operations", ())]
