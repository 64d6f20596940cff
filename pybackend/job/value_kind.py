"""One kind of value that workers send, and values of a program's own classes.

A value from a worker never causes a class to be imported or its code to run.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pybackend.words import show

# Packs a part of a value. The text is added to the value's place, e.g. ``.name``.
Pack = Callable[[Any, str], Any]
Unpack = Callable[[Any], Any]
Fields = dict[str, Any]


class UnfitError(Exception):
    """A value has a known kind, but would be changed; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class ValueKind:
    """Kind of value: its tag, and how to recognize it and convert it to and from JSON.

    ``refusals`` are the errors that ``pack`` raises if a value of this kind cannot be sent.
    """

    tag: str
    matches: Callable[[Any], bool]
    pack: Callable[[Any, Pack], Fields]
    unpack: Callable[[Fields, Unpack], Any]
    refusals: tuple[type[Exception], ...] = (UnfitError,)


def is_exactly(*kinds: type) -> Callable[[Any], bool]:
    """Return a function that matches instances of these classes, but not of derived ones."""
    return lambda value: type(value) in kinds


def is_of(module: str, *names: str, or_derived: bool = False) -> Callable[[Any], bool]:
    """Return a function that matches instances of a module's classes, if it is loaded."""

    def matches(value: Any) -> bool:
        loaded = sys.modules.get(module)
        kinds = [getattr(loaded, name, None) for name in names]
        found = tuple(kind for kind in kinds if isinstance(kind, type))
        return isinstance(value, found) if or_derived else type(value) in found

    return matches


def to_text(content: bytes | bytearray) -> str:
    """Encode bytes as base64 text."""
    return base64.b64encode(content).decode()


def _pack_enum(value: Any, pack: Pack) -> Fields:
    if type(value).__members__.get(value.name) is not value:
        raise UnfitError("it is a combination of enum members")
    return {"class": _name_of(value), "name": value.name, "value": pack(value.value, ".value")}


def _unpack_enum(fields: Fields, unpack: Unpack) -> Any:
    kind, name = _find_class(fields["class"]), fields["name"]
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    return types.SimpleNamespace(name=str(name), value=unpack(fields["value"]))


def _is_named_tuple(value: Any) -> bool:
    fields = getattr(type(value), "_fields", None)
    return isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value)


def _pack_named_tuple(value: Any, pack: Pack) -> Fields:
    if getattr(value, "__dict__", None):
        raise UnfitError(f"it has an attribute {show(next(iter(vars(value))))} besides its fields")
    names: tuple[str, ...] = getattr(type(value), "_fields", ())
    items = [pack(item, f".{name}") for name, item in zip(names, value, strict=True)]
    return {"class": _name_of(value), "names": list(names), "items": items}


def _unpack_named_tuple(fields: Fields, unpack: Unpack) -> Any:
    names, items = list(fields["names"]), [unpack(item) for item in fields["items"]]
    if len(names) != len(items):
        raise ValueError("a named tuple has more names than values, or fewer")
    kind = _find_class(fields["class"])
    is_known = kind is not None and issubclass(kind, tuple) and not hasattr(kind, "__del__")
    if kind is None or not is_known or getattr(kind, "_fields", ()) != tuple(names):
        make: Any = collections.namedtuple
        kind = make(str(fields["class"][1]).rpartition(".")[2], names)
    return tuple.__new__(kind, items)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _pack_dataclass(value: Any, pack: Pack) -> Fields:
    kind = type(value)
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    values = {name: getattr(value, name) for name in names}
    _rebuild(kind, values)  # raises an error if the driver could not do so
    for name in sorted(_find_attributes(value) - set(names)):
        raise UnfitError(f"it has an attribute {show(name)} besides its fields")
    return {"class": _name_of(value), "pairs": [[n, pack(v, f".{n}")] for n, v in values.items()]}


def _unpack_dataclass(fields: Fields, unpack: Unpack) -> Any:
    values = {str(name): unpack(value) for name, value in fields["pairs"]}
    kind = _find_class(fields["class"])
    if kind is None or not dataclasses.is_dataclass(kind):
        return types.SimpleNamespace(**values)
    if not values.keys() <= {field.name for field in dataclasses.fields(kind)}:
        return types.SimpleNamespace(**values)
    try:
        return _rebuild(kind, values)
    except UnfitError:
        return types.SimpleNamespace(**values)


def _find_attributes(value: Any) -> set[str]:
    """Return the names of an object's attributes, without cached properties."""
    kind = type(value)
    held = {
        name
        for name in getattr(value, "__dict__", {})
        if not isinstance(_look_up(kind, name), functools.cached_property)
    }
    for base in kind.__mro__:
        slots = [n for n, v in vars(base).items() if isinstance(v, types.MemberDescriptorType)]
        held |= {name for name in slots if hasattr(value, name)}
    return held


def _rebuild(kind: type, values: Mapping[str, Any]) -> Any:
    """Create an object of a class with these attributes, without running the class's own code.

    Raises
    ------
    UnfitError
        Such an object cannot be created.
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


def _name_of(value: Any) -> list[str]:
    return [type(value).__module__, type(value).__qualname__]


def _find_class(name: Sequence[str]) -> type | None:
    """Return a class of a loaded module, or None."""
    found: Any = sys.modules.get(str(name[0]))
    for part in str(name[1]).split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return found if isinstance(found, type) else None


CLASSES: tuple[ValueKind, ...] = (
    ValueKind("enum", lambda v: isinstance(v, enum.Enum), _pack_enum, _unpack_enum),
    ValueKind("named tuple", _is_named_tuple, _pack_named_tuple, _unpack_named_tuple),
    ValueKind("dataclass", _is_dataclass, _pack_dataclass, _unpack_dataclass),
)
