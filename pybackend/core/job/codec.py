"""Convert frozen dataclasses, which the processes of a job send each other, to and from JSON.

Every dataclass becomes a JSON object that names its type; the reader lists the types that it
accepts. Only instances of these types are created.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pybackend.core.words import show

TYPE = "__type__"
Message = TypeVar("Message")


def encode(message: Any) -> str:
    """Encode a dataclass as one line of JSON text.

    Its fields hold dataclasses, mappings with text as keys, lists, tuples, numbers, text or None.
    """
    # Not `asdict`, which drops the names of the types.
    return json.dumps(_pack(message))


def encode_line(message: Any) -> bytes:
    """Encode a dataclass as a line for a stream or pipe, with its line break."""
    return encode(message).encode() + b"\n"


def decode(text: str | bytes, *kinds: type[Message]) -> Message:
    """Decode the dataclass that `encode` wrote, of one of these types.

    Raises `ValueError` if the text is not JSON, its type is another one, or a field is unknown,
    absent, or of the wrong type.
    """
    try:
        found: Message = _read_dataclass(json.loads(text), kinds, "the message")
    except RecursionError as error:
        raise ValueError("the message is nested too deeply") from error
    return found


def read_fields(kind: type[Message], values: Any) -> Message:
    """Build a dataclass from a mapping of its fields; raise `ValueError` as `decode` does."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} is {_shorten(values)}, not an object")
    found: Message = _build(kind, values)
    return found


def _pack(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        packed = {field.name: _pack(getattr(value, field.name)) for field in fields(value)}
        return {TYPE: type(value).__name__, **packed}
    if isinstance(value, Mapping):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    return value


def _read_dataclass(value: Any, kinds: Sequence[type], where: str) -> Any:
    named = value.get(TYPE) if isinstance(value, Mapping) else None
    kind = next((kind for kind in kinds if kind.__name__ == named), None)
    if kind is None:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{where} is {_shorten(value)}, not {expected}")
    return _build(kind, {name: item for name, item in value.items() if name != TYPE})


def _build(kind: type, given: Mapping[str, Any]) -> Any:
    hints = _hints_of(kind)
    if unknown := sorted(given.keys() - hints.keys()):
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}")
    if absent := sorted(_required(kind) - given.keys()):
        raise ValueError(f"{kind.__name__} without {', '.join(absent)}")
    read = {n: _read(item, hints[n], f"{kind.__name__}.{n}") for n, item in given.items()}
    return kind(**read)


# Cached, here and below: a training sends thousands of events, and hints are evaluated from text.
@cache
def _hints_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


@cache
def _required(kind: type) -> frozenset[str]:
    required = [one for one in fields(kind) if one.default is one.default_factory is MISSING]
    return frozenset(one.name for one in required)


def _read(value: Any, hint: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _read_union(value, inner, where)
    if isinstance(hint, type) and is_dataclass(hint):
        return _read_dataclass(value, [hint], where)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in inner):
            return value
    elif origin in (tuple, list, Sequence):
        items = _read_items(value, inner, where, is_tuple=origin is tuple)
        return tuple(items) if origin is tuple else items
    elif origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {_shorten(value)}, not an object")
        return {key: _read(item, inner[1], f"{where}[{show(key)}]") for key, item in value.items()}
    elif _is_plain(value, hint):
        return _to_float(value, where) if hint is float else value
    raise ValueError(f"{where} is {_shorten(value)}, not {hint}")


def _is_plain(value: Any, hint: Any) -> bool:
    if hint is None or hint is type(None):
        return value is None
    # JSON writes 1.0 as 1.0, but other writers may not.
    return type(value) is hint or (hint is float and type(value) is int)


def _to_float(value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:  # a whole number of hundreds of digits
        raise ValueError(f"{where} is too large") from error


def _read_union(value: Any, hints: Sequence[Any], where: str) -> Any:
    if isinstance(value, Mapping) and TYPE in value:
        return _read_dataclass(value, [hint for hint in hints if isinstance(hint, type)], where)
    # The exact type first: a whole number may be a float, too.
    for hint in sorted(hints, key=lambda hint: hint is not type(value)):
        with suppress(ValueError):
            return _read(value, hint, where)
    raise ValueError(f"{where} is {_shorten(value)}, not {' or '.join(map(str, hints))}")


def _read_items(value: Any, hints: Sequence[Any], where: str, is_tuple: bool) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} is {_shorten(value)}, not a list")
    if not is_tuple or hints[-1] is Ellipsis:
        hints = [hints[0]] * len(value)
    if len(value) != len(hints):
        raise ValueError(f"{where} has {len(value)} items, not {len(hints)}")
    return [_read(item, hint, where) for item, hint in zip(value, hints, strict=True)]


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
