"""Kinds of values beyond JSON's own that a worker's function may return.

A received value equals the sent one and has the same class; otherwise it is rejected. So classes
are matched exactly: a derived class does not match. A value from a worker never causes a class to
be imported or its code to run. `value_tables` has the kinds of pandas and Arrow.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import pathlib
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pybackend.core.words import show

PartName = Callable[[Any, int], str]


class UnfitError(Exception):
    """A value has a known kind, but would be changed; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class ValueKind:
    """Kind of value: its tag, how to recognize it, take it apart and make it again.

    ``take`` returns the parts, which are values of other kinds: ``make(*parts)`` equals the value.
    ``name_part`` returns what errors append to the name of the value for the part at an index, such
    as ``.index``.
    """

    tag: str
    matches: Callable[[Any], bool]
    take: Callable[[Any], Sequence[Any]]
    make: Callable[..., Any]
    name_part: PartName = lambda _, __: ""


def exactly(
    kind: type,
    take: Callable[[Any], Sequence[Any]],
    make: Callable[..., Any] | None = None,
    name_part: PartName = lambda _, __: "",
) -> ValueKind:
    """Return the kind of the instances of a class, without those of derived classes."""
    return ValueKind(kind.__name__, lambda v: type(v) is kind, take, make or kind, name_part)


def is_of(module: str, *names: str, or_derived: bool = False) -> Callable[[Any], bool]:
    """Return a function that matches instances of a module's classes, if it is loaded."""

    def matches(value: Any) -> bool:
        loaded = sys.modules.get(module)
        kinds = [getattr(loaded, name, None) for name in names]
        found = tuple(kind for kind in kinds if isinstance(kind, type))
        return isinstance(value, found) if or_derived else type(value) in found

    return matches


def _take_enum(value: Any) -> Sequence[Any]:
    if type(value).__members__.get(value.name) is not value:
        raise UnfitError("it is a combination of enum members")
    return [*_name_class(value), value.name, value.value]


def _make_enum(module: str, qualname: str, name: str, value: Any) -> Any:
    kind = _find_class(module, qualname)
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    return types.SimpleNamespace(name=str(name), value=value)


def _is_named_tuple(value: Any) -> bool:
    fields = getattr(type(value), "_fields", None)
    return isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value)


def _take_named_tuple(value: Any) -> Sequence[Any]:
    if getattr(value, "__dict__", None):
        raise UnfitError(f"it has an attribute {show(next(iter(vars(value))))} besides its fields")
    return [*_name_class(value), list(_fields_of(value)), *value]


def _make_named_tuple(module: str, qualname: str, names: list[str], *items: Any) -> Any:
    if len(names) != len(items):
        raise ValueError("a named tuple has more names than values, or fewer")
    kind = _find_class(module, qualname)
    # A finalizer would run code of the class when the value is dropped.
    is_known = kind is not None and issubclass(kind, tuple) and not hasattr(kind, "__del__")
    if kind is None or not is_known or getattr(kind, "_fields", ()) != tuple(names):
        make: Any = collections.namedtuple
        kind = make(str(qualname).rpartition(".")[2], names)
    return tuple.__new__(kind, items)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _take_dataclass(value: Any) -> Sequence[Any]:
    values = {name: getattr(value, name) for name in _fields_of(value)}
    _rebuild(type(value), values)  # raises an error if the driver could not do so
    for name in sorted(_find_attributes(value) - values.keys()):
        raise UnfitError(f"it has an attribute {show(name)} besides its fields")
    return [*_name_class(value), list(values), *values.values()]


def _make_dataclass(module: str, qualname: str, names: list[str], *items: Any) -> Any:
    values = dict(zip(map(str, names), items, strict=True))
    kind = _find_class(module, qualname)
    if kind is not None and dataclasses.is_dataclass(kind):
        with contextlib.suppress(UnfitError):
            if values.keys() <= {field.name for field in dataclasses.fields(kind)}:
                return _rebuild(kind, values)
    return types.SimpleNamespace(**values)


def _fields_of(value: Any) -> Sequence[str]:
    """Return the names of the fields that a dataclass or a named tuple has."""
    if isinstance(value, tuple):
        return tuple(getattr(type(value), "_fields", ()))
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _find_attributes(value: Any) -> set[str]:
    """Return the names of an object's attributes, without cached properties."""
    kind = type(value)
    own = getattr(value, "__dict__", {})
    held = {n for n in own if not isinstance(_look_up(kind, n), functools.cached_property)}
    for base in kind.__mro__:
        slots = [n for n, v in vars(base).items() if isinstance(v, types.MemberDescriptorType)]
        held |= {name for name in slots if hasattr(value, name)}
    return held


def _rebuild(kind: type, values: Mapping[str, Any]) -> Any:
    """Create an object of a class with these attributes, without running the class's own code.

    Raises `UnfitError` if that is not possible.
    """
    if hasattr(kind, "__del__"):
        raise UnfitError(f"its class {kind.__qualname__} has a finalizer (__del__)")
    try:
        made: Any = object.__new__(kind)  # its own __init__ might do anything
    except TypeError as error:
        raise UnfitError(f"its class is more than a dataclass: {error}") from error
    for name, value in values.items():
        found = _look_up(kind, name)
        if isinstance(found, types.MemberDescriptorType):
            found.__set__(made, value)
        elif hasattr(type(found), "__set__") or not hasattr(made, "__dict__"):
            raise UnfitError(f"its class runs code to set `{name}`")
        else:
            object.__getattribute__(made, "__dict__")[name] = value
    return made


def _look_up(kind: type, name: str) -> Any:
    """Return the raw attribute of a class or its bases, without calling descriptors."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _name_class(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _find_class(module: str, qualname: str) -> type | None:
    """Return a class of a loaded module, or None."""
    found: Any = sys.modules.get(str(module))
    for part in str(qualname).split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return found if isinstance(found, type) else None


def _name_field(value: Any, index: int) -> str:
    return f".{_fields_of(value)[index - 3]}"


def _is_enum(value: Any) -> bool:
    return isinstance(value, enum.Enum)


_CLASSES: tuple[ValueKind, ...] = (
    ValueKind("enum", _is_enum, _take_enum, _make_enum, lambda _, __: ".value"),
    ValueKind("named tuple", _is_named_tuple, _take_named_tuple, _make_named_tuple, _name_field),
    ValueKind("dataclass", _is_dataclass, _take_dataclass, _make_dataclass, _name_field),
)


def _of_clock(kind: Any) -> ValueKind:
    return exactly(
        kind,
        lambda v: [v.replace(tzinfo=None).isoformat(), v.fold, v.tzinfo],
        lambda text, fold, zone: kind.fromisoformat(text).replace(fold=fold, tzinfo=zone),
        lambda _, __: ".tzinfo",
    )


def _take_offset(value: datetime.timezone) -> Sequence[Any]:
    offset, name = value.utcoffset(None), value.tzname(None)
    return [offset] if name == datetime.timezone(offset).tzname(None) else [offset, name]


def _take_zone(value: zoneinfo.ZoneInfo) -> Sequence[Any]:
    if value.key is None or zoneinfo.ZoneInfo(value.key) is not value:
        raise UnfitError("it differs from the system's time zone with the same name")
    return [value.key]


_TIMES: tuple[ValueKind, ...] = (
    _of_clock(datetime.datetime),
    _of_clock(datetime.time),
    exactly(datetime.date, lambda v: [v.isoformat()], datetime.date.fromisoformat),
    exactly(datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds]),
    exactly(datetime.timezone, _take_offset),
    # Raises an error for paths outside its folder.
    exactly(zoneinfo.ZoneInfo, _take_zone),
)


def _take_row(row: Any) -> Sequence[Any]:
    return [vars(row).get("__fields__"), list(row)]


def _make_row(names: list[str] | None, items: list[Any]) -> Any:
    from pyspark.sql import Row

    row: Any = tuple.__new__(Row, items)
    if names is not None:
        row.__fields__ = [str(name) for name in names]
    return row


def _vector(tag: str, name: str, take: Callable[[Any], Sequence[Any]]) -> ValueKind:
    """Return the kind of a class of vectors of Spark."""

    def make(*parts: Any) -> Any:
        return getattr(importlib.import_module("pyspark.ml.linalg"), name)(*parts)

    return ValueKind(tag, is_of("pyspark.ml.linalg", name), take, make)


# Allowed default factories of a defaultdict: no user code.
_FACTORIES: dict[Any, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
_FACTORIES[None] = None


def _take_default(value: collections.defaultdict[Any, Any]) -> Sequence[Any]:
    name = getattr(value.default_factory, "__name__", None)
    if _FACTORIES.get(name, name) is not value.default_factory:
        raise UnfitError("its default factory is code: return it as dict(...)")
    return [name, dict(value)]


def _make_default(name: str | None, items: dict[Any, Any]) -> Any:
    return collections.defaultdict(_FACTORIES[name], items)


_is_variable = is_of("keras", "Variable", or_derived=True)
_is_of_tensorflow = is_of("tensorflow", "Tensor", "Variable", or_derived=True)


def _is_tensor(value: Any) -> bool:
    has_values = _is_variable(value) or _is_of_tensorflow(value)
    return has_values and hasattr(value, "numpy")  # a tensor in a traced function has no values


_HISTORY = ("history", "epoch", "params")
_UTF_32 = "utf-32-le", "surrogatepass"
_AS_TEXT: tuple[type, ...] = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_AS_TEXT += (decimal.Decimal, uuid.UUID)
# Integers and text only if JSON cannot write them.
PLAIN: tuple[ValueKind, ...] = (
    exactly(int, lambda v: [hex(v)], lambda text: int(text, 16)),
    exactly(str, lambda v: [v.encode(*_UTF_32)], lambda content: content.decode(*_UTF_32)),
    *(exactly(kind, lambda v: [list(v)]) for kind in (tuple, set, frozenset)),
)
PYTHON: tuple[ValueKind, ...] = (
    *PLAIN,
    *_CLASSES,
    # A view, as the number in a damaged value would make so many zeros.
    exactly(bytearray, lambda v: [bytes(v)], lambda content: bytearray(memoryview(content))),
    exactly(collections.OrderedDict, lambda v: [dict(v)]),
    exactly(collections.Counter, lambda v: [dict(v)]),
    exactly(collections.defaultdict, _take_default, _make_default),
    exactly(collections.deque, lambda v: [list(v), v.maxlen]),
    exactly(range, lambda v: [v.start, v.stop, v.step]),
    exactly(complex, lambda v: [v.real, v.imag]),
    exactly(fractions.Fraction, lambda v: [v.numerator, v.denominator]),
    *(exactly(kind, lambda v: [str(v)]) for kind in _AS_TEXT),
    *_TIMES,
    ValueKind("row", is_of("pyspark.sql", "Row"), _take_row, _make_row),
    _vector("dense vector", "DenseVector", lambda v: [v.array]),
    _vector("sparse vector", "SparseVector", lambda v: [int(v.size), v.indices, v.values]),
    ValueKind(
        "history",
        is_of("keras.callbacks", "History", or_derived=True),
        lambda v: [getattr(v, name, None) for name in _HISTORY],
        lambda *parts: types.SimpleNamespace(**dict(zip(_HISTORY, parts, strict=True))),
        lambda _, index: f".{_HISTORY[index]}",
    ),
    ValueKind("tensor", _is_tensor, lambda v: [v.numpy()], lambda array: array),
)
