"""Values that a worker's function returns, as JSON text: data alone, never code.

Results of workers arrive over the network, and unpickling executes what it is sent. So only data
of known kinds travel: None, booleans, numbers, text, bytes, dates, lists, tuples, sets, dicts,
dataclasses, numpy arrays, pandas data frames and Arrow tables.
"""

from __future__ import annotations

import base64
import decimal
import json
import sys
from collections.abc import Sequence
from typing import Any

from pybackend.errors import SerializationError
from pybackend.job.value_kinds import KINDS, Kind, to_text

_TAG = "__tfdist__"


def encode_value(value: Any, kinds: Sequence[Kind] = KINDS) -> str:
    """JSON text of a value.

    Raises
    ------
    SerializationError
        Names the place and type of what is not of one of the kinds.
    """
    try:
        return json.dumps(_pack(value, "the returned value", kinds))
    except RecursionError as error:
        raise SerializationError(
            "the returned value is nested too deeply, or contains itself"
        ) from error


def decode_value(text: str, kinds: Sequence[Kind] = KINDS) -> Any:
    """The value that `encode_value` wrote.

    Dataclasses whose class this process has not loaded become a ``types.SimpleNamespace``, as the
    history of Keras's ``fit`` does; tensors become numpy arrays.

    Raises
    ------
    SerializationError
        If the text is damaged.
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
    ) as error:
        raise SerializationError(f"a worker's result is damaged: {error}") from error


def _pack(value: Any, where: str, kinds: Sequence[Kind]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "data": to_text(value)}
    np = sys.modules.get("numpy")  # without it no value can be its array
    if np is not None and isinstance(value, (np.ndarray, np.generic)):
        return _pack_array(np.asarray(value), isinstance(value, np.generic), where)

    def pack_part(part: Any, place: str) -> Any:
        is_key = place == " (a key)"
        return _pack(part, f"a key of {where}" if is_key else f"{where}{place}", kinds)

    if isinstance(value, list):
        return [pack_part(item, f"[{index}]") for index, item in enumerate(value)]
    for kind in kinds:
        if kind.matches(value):
            try:
                return {_TAG: kind.tag, **kind.pack(value, pack_part)}
            except kind.refusals as error:
                raise SerializationError(f"{where} cannot be sent: {error}") from error
    raise SerializationError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: workers return plain "
        "data (None, numbers, text, bytes, dates, lists, tuples, sets, dicts, dataclasses, numpy "
        "arrays, pandas and Arrow tables) and Keras models. A model whose classes need "
        "`custom_objects` travels as `model_to_base64(model)`"
    )


def _pack_array(array: Any, scalar: bool, where: str) -> dict[str, Any]:
    import numpy as np

    if array.dtype.kind not in "biufcSUmM":
        raise SerializationError(
            f"{where} is an array of {array.dtype}: numbers, times and text only"
        )
    return {
        _TAG: "scalar" if scalar else "array",
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": to_text(np.ascontiguousarray(array).tobytes()),
    }


def _unpack(value: Any, kinds: dict[str, Kind]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, kinds) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value[_TAG]
    if tag == "bytes":
        return base64.b64decode(value["data"])
    if tag in ("array", "scalar"):
        import numpy as np

        flat = np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))
        array = flat.reshape(value["shape"]).copy()
        return array if tag == "array" else array[()]
    if tag not in kinds:
        raise SerializationError(f"a worker's result holds an unknown kind of value {tag!r}")
    fields = {name: field for name, field in value.items() if name != _TAG}
    return kinds[tag].unpack(fields, lambda part: _unpack(part, kinds))
