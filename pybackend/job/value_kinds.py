"""Kinds of values beyond JSON's own that a worker's function may return, and how each travels.

Nothing is imported because a worker has named it, and no code of a class runs: a dataclass or a
named tuple is rebuilt only if this process has loaded its class already.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

# Packs a part of a value, whose place is the value's and what is added, e.g. ``.name``.
Pack = Callable[[Any, str], Any]
Unpack = Callable[[Any], Any]
Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of value: its tag, how it is recognized, and its way to JSON and back.

    ``refusals`` are the errors by which ``pack`` says that a value of this kind cannot travel.
    """

    tag: str
    matches: Callable[[Any], bool]
    pack: Callable[[Any, Pack], Fields]
    unpack: Callable[[Fields, Unpack], Any]
    refusals: tuple[type[Exception], ...] = ()


def is_of(module: str, *names: str) -> Callable[[Any], bool]:
    """Whether a value is of a class of a module; False while that is not loaded."""

    def matches(value: Any) -> bool:
        loaded = sys.modules.get(module)
        kinds = [getattr(loaded, name, None) for name in names]
        return isinstance(value, tuple(kind for kind in kinds if isinstance(kind, type)))

    return matches


def to_text(content: bytes | bytearray) -> str:
    """Bytes as base64 text."""
    return base64.b64encode(content).decode()


def _by_text(tag: str, kind: type, write: Callable[[Any], str], read: Callable[[str], Any]) -> Kind:
    return Kind(
        tag,
        lambda value: isinstance(value, kind),
        lambda value, _: {"text": write(value)},
        lambda fields, _: read(fields["text"]),
    )


def _pack_items(value: Any, pack: Pack) -> Fields:
    return {"items": [pack(item, f"[{index}]") for index, item in enumerate(value)]}


def _unpack_items(make: Callable[[Any], Any]) -> Callable[[Fields, Unpack], Any]:
    return lambda fields, unpack: make(map(unpack, fields["items"]))


def _pack_dict(value: Any, pack: Pack) -> Fields:
    return {"pairs": [[pack(k, " (a key)"), pack(v, f"[{k!r}]")] for k, v in value.items()]}


def _unpack_dict(fields: Fields, unpack: Unpack) -> Any:
    return {unpack(key): unpack(value) for key, value in fields["pairs"]}


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


def _pack_named_tuple(value: Any, pack: Pack) -> Fields:
    names = getattr(value, "_fields", ())
    items = [pack(item, f".{name}") for name, item in zip(names, value, strict=True)]
    return {"class": _name_of(value), "names": list(names), "items": items}


def _unpack_named_tuple(fields: Fields, unpack: Unpack) -> Any:
    names, items = list(fields["names"]), [unpack(item) for item in fields["items"]]
    if len(names) != len(items):
        raise ValueError("a named tuple has more names than values, or fewer")
    kind = _find_class(fields["class"])
    if kind is None or not issubclass(kind, tuple) or getattr(kind, "_fields", ()) != tuple(names):
        make: Any = collections.namedtuple
        kind = make(str(fields["class"][1]).rpartition(".")[2], names)
    return tuple.__new__(kind, items)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _pack_dataclass(value: Any, pack: Pack) -> Fields:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    pairs = [[name, pack(getattr(value, name), f".{name}")] for name in names]
    return {"class": _name_of(value), "pairs": pairs}


def _unpack_dataclass(fields: Fields, unpack: Unpack) -> Any:
    values = {str(name): unpack(value) for name, value in fields["pairs"]}
    kind = _find_class(fields["class"])
    if kind is None or not dataclasses.is_dataclass(kind):
        return types.SimpleNamespace(**values)
    if not values.keys() <= {field.name for field in dataclasses.fields(kind)}:
        return types.SimpleNamespace(**values)
    made = object.__new__(kind)  # its own __init__ might do anything
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _name_of(value: Any) -> list[str]:
    return [type(value).__module__, type(value).__qualname__]


def _find_class(name: Sequence[str]) -> type | None:
    """The class of a module that is loaded here."""
    found: Any = sys.modules.get(str(name[0]))
    for part in str(name[1]).split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return found if isinstance(found, type) else None


def _pack_table(value: Any, _: Pack) -> Fields:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, value.schema) as writer:
        writer.write(value)
    return {"data": to_text(sink.getvalue().to_pybytes())}


def _unpack_table(fields: Fields, _: Unpack) -> Any:
    import pyarrow as pa

    with pa.ipc.open_stream(base64.b64decode(fields["data"])) as reader:
        table = reader.read_all()
    table.validate(full=True)
    return table


def _pack_batch(value: Any, pack: Pack) -> Fields:
    import pyarrow as pa

    return _pack_table(pa.Table.from_batches([value]), pack)


def _unpack_batch(fields: Fields, unpack: Unpack) -> Any:
    import pyarrow as pa

    table = _unpack_table(fields, unpack).combine_chunks()
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _pack_frame(value: Any, pack: Pack) -> Fields:
    import pyarrow as pa

    return _pack_table(pa.Table.from_pandas(value), pack)


def _unpack_frame(fields: Fields, unpack: Unpack) -> Any:
    return _unpack_table(fields, unpack).to_pandas()


def _pack_series(value: Any, pack: Pack) -> Fields:
    # A data frame's column has a name, which a series may lack.
    name = pack(value.name, " (its name)")
    return {"name": name, **_pack_frame(value.to_frame("values"), pack)}


def _unpack_series(fields: Fields, unpack: Unpack) -> Any:
    return _unpack_frame(fields, unpack)["values"].rename(unpack(fields["name"]))


def _is_tensor(value: Any) -> bool:
    has_values = is_of("keras", "Variable")(value) or is_of("tensorflow", "Tensor", "Variable")(
        value
    )
    return has_values and hasattr(value, "numpy")


def _pack_history(value: Any, pack: Pack) -> Fields:
    names = ("history", "epoch", "params")
    return {name: pack(getattr(value, name, None), f".{name}") for name in names}


def _unpack_history(fields: Fields, unpack: Unpack) -> Any:
    return types.SimpleNamespace(**{name: unpack(value) for name, value in fields.items()})


# Arrow's errors are these, or derived from them.
_ARROW = (ValueError, TypeError, NotImplementedError, OverflowError)
KINDS: tuple[Kind, ...] = (
    Kind("named tuple", _is_named_tuple, _pack_named_tuple, _unpack_named_tuple),
    Kind("tuple", lambda v: isinstance(v, tuple), _pack_items, _unpack_items(tuple)),
    Kind("dict", lambda v: isinstance(v, dict), _pack_dict, _unpack_dict),
    Kind("set", lambda v: isinstance(v, set), _pack_items, _unpack_items(set)),
    Kind("frozenset", lambda v: isinstance(v, frozenset), _pack_items, _unpack_items(frozenset)),
    Kind(
        "complex",
        lambda v: isinstance(v, complex),
        lambda v, _: {"parts": [v.real, v.imag]},
        lambda fields, _: complex(*fields["parts"]),
    ),
    _by_text(
        "datetime",
        datetime.datetime,
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    _by_text("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    _by_text("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    Kind(
        "timedelta",
        lambda v: isinstance(v, datetime.timedelta),
        lambda v, _: {"parts": [v.days, v.seconds, v.microseconds]},
        lambda fields, _: datetime.timedelta(*fields["parts"]),
    ),
    _by_text("decimal", decimal.Decimal, str, decimal.Decimal),
    _by_text("path", pathlib.PurePath, str, pathlib.Path),
    Kind("dataclass", _is_dataclass, _pack_dataclass, _unpack_dataclass),
    Kind("data frame", is_of("pandas", "DataFrame"), _pack_frame, _unpack_frame, _ARROW),
    Kind("series", is_of("pandas", "Series"), _pack_series, _unpack_series, _ARROW),
    Kind("table", is_of("pyarrow", "Table"), _pack_table, _unpack_table),
    Kind("batch", is_of("pyarrow", "RecordBatch"), _pack_batch, _unpack_batch),
    Kind("history", is_of("keras.callbacks", "History"), _pack_history, _unpack_history),
    Kind(
        "tensor",
        _is_tensor,
        lambda v, pack: {"array": pack(v.numpy(), "")},
        lambda fields, unpack: unpack(fields["array"]),
    ),
)
