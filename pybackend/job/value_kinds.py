"""Kinds of values beyond JSON's own that a worker's function may return.

A received value equals the sent one and has the same class; otherwise it is rejected. So classes
are matched exactly: a derived class does not match.
"""

from __future__ import annotations

import base64
import collections
import decimal
import fractions
import pathlib
import types
import uuid
from collections.abc import Callable
from typing import Any

from pybackend.job.value_kind import (
    CLASSES,
    Fields,
    Pack,
    UnfitError,
    Unpack,
    ValueKind,
    is_exactly,
    is_of,
    to_text,
)
from pybackend.job.value_tables import TABLES, TIMES
from pybackend.words import show


def _pack_row(value: Any, pack: Pack) -> Fields:
    names = vars(value).get("__fields__")
    items = [pack(item, f"[{place}]") for place, item in enumerate(value)]
    return {"names": None if names is None else list(names), "items": items}


def _unpack_row(fields: Fields, unpack: Unpack) -> Any:
    from pyspark.sql import Row

    row: Any = tuple.__new__(Row, [unpack(item) for item in fields["items"]])
    if fields["names"] is not None:
        row.__fields__ = [str(name) for name in fields["names"]]
    return row


def _unpack_dense(fields: Fields, unpack: Unpack) -> Any:
    from pyspark.ml.linalg import DenseVector

    return DenseVector(unpack(fields["values"]))


def _unpack_sparse(fields: Fields, unpack: Unpack) -> Any:
    from pyspark.ml.linalg import SparseVector

    return SparseVector(fields["size"], unpack(fields["indices"]), unpack(fields["values"]))


OF_SPARK: tuple[ValueKind, ...] = (
    ValueKind("row", is_of("pyspark.sql", "Row"), _pack_row, _unpack_row),
    ValueKind(
        "dense vector",
        is_of("pyspark.ml.linalg", "DenseVector"),
        lambda v, pack: {"values": pack(v.array, "")},
        _unpack_dense,
    ),
    ValueKind(
        "sparse vector",
        is_of("pyspark.ml.linalg", "SparseVector"),
        lambda v, pack: {
            "size": int(v.size),
            "indices": pack(v.indices, ""),
            "values": pack(v.values, ""),
        },
        _unpack_sparse,
    ),
)


_PATHS = (
    pathlib.PosixPath,
    pathlib.WindowsPath,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
)


def _by_text(
    tag: str, kind: type, write: Callable[[Any], str], read: Callable[[str], Any]
) -> ValueKind:
    return ValueKind(
        tag,
        is_exactly(kind),
        lambda value, _: {"text": write(value)},
        lambda fields, _: read(fields["text"]),
    )


def _pack_items(value: Any, pack: Pack) -> Fields:
    return {"items": [pack(item, f"[{index}]") for index, item in enumerate(value)]}


def _of_items(tag: str, kind: type) -> ValueKind:
    return ValueKind(
        tag,
        is_exactly(kind),
        _pack_items,
        lambda fields, unpack: kind(map(unpack, fields["items"])),
    )


def _pack_dict(value: Any, pack: Pack) -> Fields:
    return {"pairs": [[pack(k, " (a key)"), pack(v, f"[{show(k)}]")] for k, v in value.items()]}


def _unpack_dict(fields: Fields, unpack: Unpack) -> dict[Any, Any]:
    return {unpack(key): unpack(value) for key, value in fields["pairs"]}


def _of_pairs(tag: str, kind: type) -> ValueKind:
    return ValueKind(tag, is_exactly(kind), _pack_dict, lambda *given: kind(_unpack_dict(*given)))


# Allowed default factories of a defaultdict: no user code.
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}


def _pack_default(value: collections.defaultdict[Any, Any], pack: Pack) -> Fields:
    name = getattr(value.default_factory, "__name__", None)
    if value.default_factory is not None and _FACTORIES.get(str(name)) is not value.default_factory:
        raise UnfitError("its default factory is code: return it as dict(...)")
    return {"factory": name, **_pack_dict(value, pack)}


def _unpack_default(fields: Fields, unpack: Unpack) -> Any:
    factory = None if fields["factory"] is None else _FACTORIES[fields["factory"]]
    return collections.defaultdict(factory, _unpack_dict(fields, unpack))


def _unpack_path(fields: Fields, unpack: Unpack) -> Any:
    kinds = {kind.__name__: kind for kind in _PATHS}
    return kinds[fields["class"]](unpack(fields["path"]))


def _is_tensor(value: Any) -> bool:
    has_values = any(
        is_of(module, *names, or_derived=True)(value)
        for module, *names in (("keras", "Variable"), ("tensorflow", "Tensor", "Variable"))
    )
    return has_values and hasattr(value, "numpy")


def _pack_history(value: Any, pack: Pack) -> Fields:
    names = ("history", "epoch", "params")
    return {name: pack(getattr(value, name, None), f".{name}") for name in names}


def _unpack_history(fields: Fields, unpack: Unpack) -> Any:
    return types.SimpleNamespace(**{name: unpack(value) for name, value in fields.items()})


KINDS: tuple[ValueKind, ...] = (
    # These two get only values that JSON cannot write.
    _by_text("integer", int, hex, lambda text: int(text, 16)),
    _by_text(
        "text",
        str,
        lambda text: to_text(text.encode("utf-32-le", "surrogatepass")),
        lambda text: base64.b64decode(text).decode("utf-32-le", "surrogatepass"),
    ),
    _by_text("bytes", bytes, to_text, base64.b64decode),
    _by_text("bytearray", bytearray, to_text, lambda text: bytearray(base64.b64decode(text))),
    *CLASSES,
    *OF_SPARK,
    _of_items("tuple", tuple),
    _of_pairs("dict", dict),
    _of_pairs("ordered dict", collections.OrderedDict),
    _of_pairs("counter", collections.Counter),
    ValueKind("default dict", is_exactly(collections.defaultdict), _pack_default, _unpack_default),
    ValueKind(
        "deque",
        is_exactly(collections.deque),
        lambda v, pack: {"most": v.maxlen, **_pack_items(v, pack)},
        lambda fields, unpack: collections.deque(map(unpack, fields["items"]), fields["most"]),
    ),
    ValueKind(
        "range",
        is_exactly(range),
        lambda v, pack: {"ends": [pack(end, "") for end in (v.start, v.stop, v.step)]},
        lambda fields, unpack: range(*map(unpack, fields["ends"])),
    ),
    _of_items("set", set),
    _of_items("frozenset", frozenset),
    ValueKind(
        "complex",
        is_exactly(complex),
        lambda v, _: {"parts": [v.real, v.imag]},
        lambda fields, _: complex(*fields["parts"]),
    ),
    *TIMES,
    _by_text("decimal", decimal.Decimal, str, decimal.Decimal),
    ValueKind(
        "fraction",
        is_exactly(fractions.Fraction),
        lambda v, pack: {"parts": [pack(v.numerator, ""), pack(v.denominator, "")]},
        lambda fields, unpack: fractions.Fraction(*map(unpack, fields["parts"])),
    ),
    _by_text("uuid", uuid.UUID, str, uuid.UUID),
    ValueKind(
        "path",
        is_exactly(*_PATHS),
        lambda v, pack: {"class": type(v).__name__, "path": pack(str(v), "")},
        _unpack_path,
    ),
    *TABLES,
    ValueKind(
        "history",
        is_of("keras.callbacks", "History", or_derived=True),
        _pack_history,
        _unpack_history,
    ),
    ValueKind(
        "tensor",
        _is_tensor,
        lambda v, pack: {"array": pack(v.numpy(), "")},
        lambda fields, unpack: unpack(fields["array"]),
    ),
)
