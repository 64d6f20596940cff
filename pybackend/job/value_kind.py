"""Kind of value that workers send: how to recognize it, and to convert it to and from JSON."""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

# Packs a part of a value. The text is added to the value's place, e.g. ``.name``.
Pack = Callable[[Any, str], Any]
Unpack = Callable[[Any], Any]
Fields = dict[str, Any]


class UnfitError(Exception):
    """A value is of a known kind, but would be changed; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class ValueKind:
    """Kind of value: its tag, how to recognize it, and to convert it to and from JSON.

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
