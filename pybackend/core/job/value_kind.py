"""One kind of value that workers send, and values of a program's own classes.

A value from a worker never causes a class to be imported or its code to run.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pybackend.core.words import show

Place = Callable[[Any, int], str]


class UnfitError(Exception):
    """A value has a known kind, but would be changed; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class ValueKind:
    """Kind of value: its tag, how to recognize it, take it apart and make it again.

    ``take`` returns the parts, which are values of other kinds: ``make(*parts)`` equals the value.
    ``place`` returns the text that errors add to the value's place for the part at an index.
    """

    tag: str
    matches: Callable[[Any], bool]
    take: Callable[[Any], Sequence[Any]]
    make: Callable[..., Any]
    place: Place = lambda _, __: ""


def exactly(
    kind: type,
    take: Callable[[Any], Sequence[Any]],
    make: Callable[..., Any] | None = None,
    place: Place = lambda _, __: "",
) -> ValueKind:
    """Return the kind of the instances of a class, without those of derived classes."""
    return ValueKind(kind.__name__, lambda v: type(v) is kind, take, make or kind, place)


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
    return [*_name_of(value), value.name, value.value]


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
    return [*_name_of(value), list(_fields_of(value)), *value]


def _make_named_tuple(module: str, qualname: str, names: list[str], *items: Any) -> Any:
    if len(names) != len(items):
        raise ValueError("a named tuple has more names than values, or fewer")
    kind = _find_class(module, qualname)
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
    return [*_name_of(value), list(values), *values.values()]


def _make_dataclass(module: str, qualname: str, names: list[str], *items: Any) -> Any:
    values = dict(zip(map(str, names), items, strict=True))
    kind = _find_class(module, qualname)
    if kind is None or not dataclasses.is_dataclass(kind):
        return types.SimpleNamespace(**values)
    if not values.keys() <= {field.name for field in dataclasses.fields(kind)}:
        return types.SimpleNamespace(**values)
    try:
        return _rebuild(kind, values)
    except UnfitError:
        return types.SimpleNamespace(**values)


def _fields_of(value: Any) -> Sequence[str]:
    """Return the names of the fields that a dataclass or a named tuple has."""
    if isinstance(value, tuple):
        names: tuple[str, ...] = getattr(type(value), "_fields", ())
        return names
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


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


def _name_of(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _find_class(module: str, qualname: str) -> type | None:
    """Return a class of a loaded module, or None."""
    found: Any = sys.modules.get(str(module))
    for part in str(qualname).split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return found if isinstance(found, type) else None


def _place_field(value: Any, index: int) -> str:
    return f".{_fields_of(value)[index - 3]}"


CLASSES: tuple[ValueKind, ...] = (
    ValueKind(
        "enum", lambda v: isinstance(v, enum.Enum), _take_enum, _make_enum, lambda _, __: ".value"
    ),
    ValueKind("named tuple", _is_named_tuple, _take_named_tuple, _make_named_tuple, _place_field),
    ValueKind("dataclass", _is_dataclass, _take_dataclass, _make_dataclass, _place_field),
)
