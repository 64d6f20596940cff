"""Plain data and arrays in one file: JSON, followed by the arrays it refers to; never code."""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any

import numpy as np

from pybackend.errors import SerializationError

_MAGIC = b"tfdist-1"
_HEAD = struct.Struct("<8sQ")
_TYPE = re.compile(r"[<>|][biufcSU]\d{1,9}")
# Types that numpy supports only with ml_dtypes, which TensorFlow installs.
_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def encode_state(value: Any) -> bytes:
    """Encode nested dicts, lists, tuples, sets, numbers, text, bytes, None and arrays.

    Raises
    ------
    SerializationError
        A value has another type.
    """
    arrays: list[Any] = []
    tree = _pack(value, arrays)
    kinds = [[_name_type(array), list(array.shape)] for array in arrays]
    header = json.dumps([tree, kinds]).encode()
    contents = [np.ascontiguousarray(array).tobytes() for array in arrays]
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *contents])


def decode_state(data: bytes) -> Any:
    """Decode bytes that `encode_state` returned.

    Raises
    ------
    SerializationError
        The bytes are damaged.
    """
    try:
        magic, size = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"it does not begin with {_MAGIC.decode()}")
        place = _HEAD.size + size
        tree, kinds = json.loads(data[_HEAD.size : place])
        arrays = []
        for name, shape in kinds:
            array = _read_array(data, place, _find_type(name), shape)
            place += array.nbytes
            arrays.append(array)
        if place != len(data):
            raise ValueError(f"it has {len(data)} bytes, not {place}")
        return _unpack(tree, arrays)
    except (ValueError, TypeError, LookupError, RecursionError, struct.error) as error:
        raise SerializationError(f"the state of a checkpoint is damaged: {error}") from error


def _read_array(data: bytes, place: int, dtype: Any, shape: Any) -> Any:
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise ValueError(f"it has an array of shape {shape}")
    if math.prod(shape) * dtype.itemsize > len(data) - place:
        raise ValueError(f"it has {len(data)} bytes and an array of shape {shape} at {place}")
    return np.frombuffer(data, dtype, math.prod(shape), place).reshape(shape).copy()


def _pack(value: Any, arrays: list[Any]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_pack(item, arrays) for item in value]
    if type(value) is dict:
        return {"dict": [[_pack(k, arrays), _pack(v, arrays)] for k, v in value.items()]}
    if type(value) in (tuple, set, frozenset):
        return {type(value).__name__: [_pack(item, arrays) for item in value]}
    if isinstance(value, bytes):
        arrays.append(np.frombuffer(value, np.uint8))
        return {"bytes": len(arrays) - 1}
    if isinstance(value, (np.ndarray, np.generic)):
        arrays.append(np.asarray(value))
        return {"array" if isinstance(value, np.ndarray) else "number": len(arrays) - 1}
    raise SerializationError(f"a {type(value).__name__} is not plain data")


def _unpack(value: Any, arrays: list[Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {_unpack(k, arrays): _unpack(v, arrays) for k, v in content}
    if kind == "bytes":
        return arrays[content].tobytes()
    if kind in ("array", "number"):
        return arrays[content] if kind == "array" else arrays[content][()]
    make: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return make(_unpack(item, arrays) for item in content)


def _name_type(array: Any) -> str:
    dtype = array.dtype
    if dtype.name in _NARROW:
        return str(dtype.name)
    if dtype.kind not in "biufcSU":
        raise SerializationError(f"an array of {dtype} is not plain data")
    return str(dtype.str)


def _find_type(name: str) -> Any:
    if name in _NARROW:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    if not _TYPE.fullmatch(name):  # numpy accepts many other strings
        raise ValueError(f"it has an array of {name}")
    return np.dtype(name)
