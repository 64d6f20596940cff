"""Plain data and arrays as JSON text, or as bytes with the arrays after the JSON; never code.

Results of workers arrive over the network, and unpickling would execute code in them. So only data
of known kinds (`value_kinds`, `value_tables`) is sent: None, booleans, numbers, text, bytes, dates,
lists, tuples, sets, dicts, enums, dataclasses, numpy arrays, pandas data frames and Arrow tables.
The received values equal the sent ones and have the same class; other values are rejected.

A value that JSON cannot write becomes an object with one entry: its kind, and its parts. Two other
formats differ for a reason. Messages (`codec`) are checked against the types that their reader
expects. Rows that Spark feeds (`pybackend.tfos.feed.items`) are columns of Arrow, as Spark sends
them; it encodes only what is not a column as here.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from pybackend.core.errors import SerializationError
from pybackend.core.job.value_kinds import PLAIN, PYTHON, PartName, UnfitError, ValueKind
from pybackend.core.job.value_tables import TABLES
from pybackend.core.words import show

KINDS: tuple[ValueKind, ...] = (*PYTHON, *TABLES)

_MAGIC = b"tfdist-2"
_HEAD = struct.Struct("<8sQ")
# Python raises an error for integers of too many digits; the limit can be set.
_MOST_BITS = 2000
_SURROGATE = re.compile("[\ud800-\udfff]")
_KEY = " (a key)"
_TYPE = re.compile(r"[<>|]([biufcSU]\d{1,9}|[mM]8(\[\w+\])?)")
# Types that numpy supports only with ml_dtypes, which TensorFlow installs.
_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
# The error for an instance of a derived class names these.
_BASES = (bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, complex)
# Arrow's errors are these, or derived from them.
REFUSALS = (UnfitError, ValueError, TypeError, NotImplementedError, OverflowError, KeyError)
_DAMAGE: tuple[type[Exception], ...] = (*REFUSALS, ArithmeticError, AttributeError, LookupError)
# The last two are Arrow's: the second one at an early end.
_DAMAGE += (MemoryError, RecursionError, struct.error, OSError, StopIteration)


def encode_value(
    value: Any, kinds: Sequence[ValueKind] = KINDS, name: str = "the returned value"
) -> str:
    """Return the JSON text of a value. Messages refer to it by ``name``.

    Raises `SerializationError`, which names the position and type of a part that is not of a known
    kind.
    """
    return _Packer(kinds, lambda content: base64.b64encode(content).decode()).write(value, name)


def decode_value(text: str, kinds: Sequence[ValueKind] = KINDS) -> Any:
    """Decode the value that `encode_value` wrote; raise `SerializationError` if it is damaged.

    Dataclasses whose class this process has not loaded become a ``types.SimpleNamespace``, as the
    history of Keras's ``fit`` does; tensors become numpy arrays.
    """
    with naming_damage("a worker's result"):
        return _Unpacker(kinds, base64.b64decode).unpack(json.loads(text))


def encode_state(value: Any) -> bytes:
    """Encode nested dicts, lists, tuples, sets, numbers, text, bytes, None and arrays.

    Raises `SerializationError` for other types.
    """
    contents: list[Any] = []

    def store(content: Any) -> int:
        contents.append(content)
        return len(content)

    header = _Packer(PLAIN, store).write(value, "the state").encode()
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *contents])


def decode_state(data: Any) -> Any:
    """Decode bytes of `encode_state`; raise `SerializationError` if they are damaged."""
    with naming_damage("the state of a checkpoint"):
        magic, size = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"it does not begin with {_MAGIC.decode()}")
        view, end = memoryview(data), _HEAD.size + size

        def load(size: int) -> memoryview:
            nonlocal end
            if type(size) is not int or not 0 <= size <= len(view) - end:
                raise ValueError(f"it has {len(view)} bytes, and a part of {size} at {end}")
            end += size
            return view[end - size : end]

        header = json.loads(bytes(view[_HEAD.size : end]))
        value = _Unpacker(PLAIN, load).unpack(header)
        if end != len(view):
            raise ValueError(f"it has {len(view)} bytes, not {end}")
        return value


@contextmanager
def naming_damage(what: str) -> Iterator[None]:
    """Raise `SerializationError` if data that cannot be read causes an error."""
    try:
        yield
    except _DAMAGE as error:
        raise SerializationError(f"{what} is damaged: {error}") from error


class _NotSentError(Exception):
    """A part of a value cannot be sent: why, after the names of the parts around it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.path: list[str] = []
        """Names of parts, from inner to outer."""
        super().__init__()

    def describe(self, where: str) -> str:
        for name in reversed(self.path):
            where = f"a key of {where}" if name == _KEY else f"{where}{name}"
        return f"{where}{self.reason}"


@dataclass(frozen=True)
class _Packer:
    """Writer of values; ``store`` stores bytes, and returns what JSON has in their place."""

    kinds: Sequence[ValueKind]
    store: Callable[[Any], Any]

    def write(self, value: Any, name: str) -> str:
        try:
            return json.dumps(self._pack(value))
        except RecursionError as error:
            raise SerializationError(f"{name} is nested too deeply, or contains itself") from error
        except _NotSentError as error:
            raise SerializationError(error.describe(name)) from error.__cause__

    def _pack(self, value: Any) -> Any:
        if value is None or _is_plain(value):
            return value
        exact = type(value)
        if exact is list:
            return self._pack_parts(value, value, lambda _, index: f"[{index}]")
        if exact is dict:
            return {"dict": self._pack_parts(chain.from_iterable(value.items()), value, _name_item)}
        if exact is bytes:
            return {"bytes": [self.store(value)]}
        np = sys.modules.get("numpy")  # if it is not loaded, no value is an array
        if np is not None and isinstance(value, (np.ndarray, np.generic)):
            return self._pack_array(value, np)
        for kind in self.kinds:
            if kind.matches(value):
                try:
                    parts = kind.take(value)
                except REFUSALS as error:
                    reason = f", a {_name(value)}, cannot be sent: {error}"
                    raise _NotSentError(reason) from error
                return {kind.tag: self._pack_parts(parts, value, kind.name_part)}
        raise _NotSentError(_refuse(value))

    def _pack_parts(self, parts: Iterable[Any], whole: Any, name_part: PartName) -> list[Any]:
        packed: list[Any] = []
        try:
            for part in parts:
                packed.append(self._pack(part))
        except _NotSentError as error:
            error.path.append(name_part(whole, len(packed)))
            raise
        return packed

    def _pack_array(self, value: Any, np: Any) -> dict[str, Any]:
        array = np.asarray(value)  # whose type for an empty text has a length
        kind = array.dtype
        is_scalar = isinstance(value, np.generic)
        if kind.kind == "O" and type(value) is np.ndarray:
            return {"objects": [list(value.shape), self._pack(value.ravel().tolist())]}
        name = kind.str
        if kind.kind not in "biufcSUmM" or np.dtype(name) != kind:
            name = kind.name
        if name != kind.str and name not in _NARROW:
            raise _NotSentError(f" is an array of {kind}: numbers, times and text only")
        array = np.ascontiguousarray(array).reshape(-1)
        # NumPy drops NUL characters at the end of a text.
        is_cut = is_scalar and kind.kind in "SU" and len(array[0]) != len(value)
        if is_cut or type(value) is not (kind.type if is_scalar else np.ndarray):
            raise _NotSentError(
                f" is a {_name(value)}, which would be changed: return it as an array with "
                "numpy.asarray(...), or as Python numbers and text"
            )
        content = array.view(np.uint8) if array.size and kind.itemsize else b""
        tag = "scalar" if is_scalar else "array"
        return {tag: [name, list(value.shape), self.store(content)]}


class _Unpacker:
    """Reader of values; ``load`` returns the bytes that were stored."""

    def __init__(self, kinds: Sequence[ValueKind], load: Callable[[Any], Any]) -> None:
        self._kinds = {kind.tag: kind for kind in kinds}
        self._load = load

    def unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((tag, packed),) = value.items()
        if tag == "bytes":
            (content,) = packed
            return bytes(self._load(content))
        if tag in ("array", "scalar"):
            return self._unpack_array(*packed, is_scalar=tag == "scalar")
        parts = [self.unpack(part) for part in packed]
        if tag == "dict":
            return dict(zip(parts[::2], parts[1::2], strict=True))
        if tag == "objects":
            return _make_objects(*parts)
        if tag not in self._kinds:
            raise ValueError(f"it has an unknown kind of value {show(tag)}")
        return self._kinds[tag].make(*parts)

    def _unpack_array(self, name: str, shape: list[int], content: Any, *, is_scalar: bool) -> Any:
        import numpy as np

        dtype, data = _find_type(name), self._load(content)
        # Lengths such as -2 and -2, or 0 and 2**60, would pass the next check.
        if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
            raise ValueError(f"it has an array of shape {shape}")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"it has an array of shape {shape} in {len(data)} bytes")
        # A copy: an array over the received bytes would be read-only, and hold all of them.
        array = np.frombuffer(data, dtype, math.prod(shape)).reshape(shape).copy()
        return array[()] if is_scalar else array


def _is_plain(value: Any) -> bool:
    """Return whether JSON preserves the value."""
    kind = type(value)
    if kind is str:  # JSON would join two surrogates into one character
        return value.isascii() or _SURROGATE.search(value) is None
    return kind in (bool, float) or (kind is int and value.bit_length() <= _MOST_BITS)


def _name_item(items: dict[Any, Any], index: int) -> str:
    key = next(islice(items, index // 2, None))
    return f"[{show(key)}]" if index % 2 else _KEY


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _refuse(value: Any) -> str:
    if base := next((kind.__name__ for kind in _BASES if isinstance(value, kind)), ""):
        return f" is a {_name(value)}, which would become a plain {base}: return it as {base}(...)"
    return (
        f" is a {_name(value)}, which cannot be sent; expected plain data ({show(None)}, "
        "numbers, text, bytes, dates, lists, tuples, sets, dicts, dataclasses, numpy arrays, "
        "pandas and Arrow tables) or a Keras model. Return a model whose classes need "
        "`custom_objects` as `model_to_base64(model)`"
    )


def _find_type(name: str) -> Any:
    import numpy as np

    if name in _NARROW:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    if not _TYPE.fullmatch(name):  # numpy accepts many other strings
        raise ValueError(f"it has an array of {name}")
    return np.dtype(name)


def _make_objects(shape: list[int], items: list[Any]) -> Any:
    """Return an array of Python objects, mostly strings."""
    import numpy as np

    array = np.empty(len(items), object)
    for index, item in enumerate(items):  # as one list, numpy would look into nested ones
        array[index] = item
    return array.reshape(shape)
