"""Values that a worker's function returns, as JSON text: only data, never code.

Results of workers arrive over the network, and unpickling would execute code in them. So only data
of known kinds is sent: None, booleans, numbers, text, bytes, dates, lists, tuples, sets, dicts,
enums, dataclasses, numpy arrays, pandas data frames and Arrow tables. The received values equal the
sent ones and have the same class; other values are rejected.
"""

from __future__ import annotations

import base64
import decimal
import json
import struct
import sys
from collections.abc import Sequence
from typing import Any

from pybackend.errors import SerializationError
from pybackend.job.value_kind import Pack, ValueKind, to_text
from pybackend.job.value_kinds import KINDS
from pybackend.words import show

_TAG = "__tfdist__"
_MOST_BITS = 2000
# The error for an instance of a derived class names these.
_BASES = (bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, complex)


def encode_value(
    value: Any, kinds: Sequence[ValueKind] = KINDS, name: str = "the returned value"
) -> str:
    """Return the JSON text of a value. Messages refer to it by ``name``.

    Raises
    ------
    SerializationError
        Names the position and type of a part that is not of a known kind.
    """
    try:
        return json.dumps(_pack(value, name, kinds))
    except RecursionError as error:
        raise SerializationError(f"{name} is nested too deeply, or contains itself") from error


def decode_value(text: str, kinds: Sequence[ValueKind] = KINDS) -> Any:
    """Decode the value that `encode_value` wrote.

    Dataclasses whose class this process has not loaded become a ``types.SimpleNamespace``, as the
    history of Keras's ``fit`` does; tensors become numpy arrays.

    Raises
    ------
    SerializationError
        The text is damaged.
    """
    try:
        return _unpack(json.loads(text), {kind.tag: kind for kind in kinds})
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        MemoryError,
        NotImplementedError,
        OSError,  # Arrow's
        OverflowError,
        RecursionError,
        SyntaxError,  # numpy reads some types as Python
        decimal.InvalidOperation,
        struct.error,
    ) as error:
        raise SerializationError(f"a worker's result is damaged: {error}") from error


def _pack(value: Any, where: str, kinds: Sequence[ValueKind]) -> Any:
    if value is None or _is_plain(value):
        return value

    def pack_part(part: Any, place: str) -> Any:
        is_key = place == " (a key)"
        return _pack(part, f"a key of {where}" if is_key else f"{where}{place}", kinds)

    np = sys.modules.get("numpy")  # if it is not loaded, no value is an array
    if np is not None and isinstance(value, (np.ndarray, np.generic)):
        return _pack_array(value, where, pack_part)

    if type(value) is list:
        return [pack_part(item, f"[{index}]") for index, item in enumerate(value)]
    for kind in kinds:
        if kind.matches(value):
            try:
                return {_TAG: kind.tag, **kind.pack(value, pack_part)}
            except kind.refusals as error:
                raise SerializationError(
                    f"{where}, a {_name(value)}, cannot be sent: {error}"
                ) from error
    raise SerializationError(_refuse(value, where))


def _is_plain(value: Any) -> bool:
    """Return whether JSON preserves the value."""
    kind = type(value)
    if kind is str:
        return value.isascii() or _is_unicode(value)
    # Python raises an error for integers of too many digits; the limit can be set.
    return kind in (bool, float) or (kind is int and value.bit_length() <= _MOST_BITS)


def _is_unicode(text: str) -> bool:
    """Return whether a string has no surrogates; JSON would join two of them into one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _refuse(value: Any, where: str) -> str:
    base = next((kind for kind in _BASES if isinstance(value, kind)), None)
    if base is not None:
        return (
            f"{where} is a {_name(value)}, which would become a plain {base.__name__}: "
            f"return it as {base.__name__}(...)"
        )
    return (
        f"{where} is a {_name(value)}, which cannot be sent; expected plain data ({show(None)}, "
        "numbers, text, bytes, dates, lists, tuples, sets, dicts, dataclasses, numpy arrays, "
        "pandas and Arrow tables) or a Keras model. Return a model whose classes need "
        "`custom_objects` as `model_to_base64(model)`"
    )


def _pack_array(value: Any, where: str, pack: Pack) -> dict[str, Any]:
    import numpy as np

    array = np.asarray(value)
    kind = array.dtype
    is_scalar = isinstance(value, np.generic)
    if kind.kind == "O" and type(value) is np.ndarray:
        items = [pack(item, f"[{place}]") for place, item in enumerate(value.flat)]
        return {_TAG: "objects", "shape": list(value.shape), "items": items}
    if kind.kind not in "biufcSUmM" or np.dtype(kind.str) != kind:
        raise SerializationError(f"{where} is an array of {kind}: numbers, times and text only")
    is_exact = type(value) is np.ndarray
    if is_scalar:
        again = array[()]
        # NumPy drops NUL characters at the end of a text.
        is_exact = type(value) is kind.type and (kind.kind not in "SU" or len(again) == len(value))
    if not is_exact:
        raise SerializationError(
            f"{where} is a {_name(value)}, which would be changed: return it as an array with "
            "numpy.asarray(...), or as Python numbers and text"
        )
    return {
        _TAG: "scalar" if is_scalar else "array",
        "dtype": kind.str,
        "shape": list(array.shape),
        "data": to_text(np.ascontiguousarray(array).tobytes()),
    }


def _unpack(value: Any, kinds: dict[str, ValueKind]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, kinds) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value[_TAG]
    if tag in ("array", "scalar"):
        import numpy as np

        flat = np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))
        array = flat.reshape(value["shape"]).copy()
        return array if tag == "array" else array[()]
    if tag == "objects":
        return _unpack_objects(value, kinds)
    if tag not in kinds:
        raise SerializationError(f"a worker's result contains an unknown kind of value {show(tag)}")
    fields = {name: field for name, field in value.items() if name != _TAG}
    return kinds[tag].unpack(fields, lambda part: _unpack(part, kinds))


def _unpack_objects(fields: dict[str, Any], kinds: dict[str, ValueKind]) -> Any:
    """Unpack an array of Python objects, mostly strings."""
    import numpy as np

    array = np.empty(len(fields["items"]), object)
    for place, item in enumerate(fields["items"]):
        array[place] = _unpack(item, kinds)
    return array.reshape(fields["shape"])
