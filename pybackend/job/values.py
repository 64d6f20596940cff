"""Values that a worker's function returns, as JSON text: data alone, never code.

Results of workers arrive over the network, and unpickling executes what it is sent. So only
plain data travel: None, booleans, numbers, text, bytes, lists, tuples, dicts and numpy arrays.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from pybackend.errors import SerializationError

_TAG = "__tfdist__"


def encode_value(value: Any) -> str:
    """JSON text of a value.

    Raises
    ------
    SerializationError
        Names the place and type of what is not plain data.
    """
    return json.dumps(_pack(value, "the returned value"))


def decode_value(text: str) -> Any:
    """The value that `encode_value` wrote.

    Raises
    ------
    SerializationError
        If the text is damaged.
    """
    try:
        return _unpack(json.loads(text))
    except (
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
        SyntaxError,  # numpy reads some types as Python
    ) as error:
        raise SerializationError(f"a worker's result is damaged: {error}") from error


def _pack(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    np = sys.modules.get("numpy")  # without it no value can be its array
    if np is not None and isinstance(value, (np.ndarray, np.generic)):
        return _pack_array(np.asarray(value), isinstance(value, np.generic), where)
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, dict):
        pairs = [
            [_pack(k, f"a key of {where}"), _pack(v, f"{where}[{k!r}]")] for k, v in value.items()
        ]
        return {_TAG: "dict", "pairs": pairs}
    raise SerializationError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: workers return plain "
        "data (None, numbers, text, bytes, lists, tuples, dicts, numpy arrays). "
        "Return a Keras model as `model_to_base64(model)`"
    )


def _pack_array(array: Any, scalar: bool, where: str) -> dict[str, Any]:
    import numpy as np

    if array.dtype.kind not in "biufcSU":
        raise SerializationError(f"{where} is an array of {array.dtype}: numbers and text only")
    return {
        _TAG: "scalar" if scalar else "array",
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
    }


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_TAG]
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "tuple":
        return tuple(_unpack(item) for item in value["items"])
    if kind == "dict":
        return {_unpack(k): _unpack(v) for k, v in value["pairs"]}
    if kind in ("array", "scalar"):
        import numpy as np

        flat = np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))
        array = flat.reshape(value["shape"]).copy()
        return array if kind == "array" else array[()]
    raise SerializationError(f"a worker's result holds an unknown kind of value {kind!r}")
