"""One kind of value that workers send: how it is recognized, and its way to JSON and back."""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

# Packs a part of a value, whose place is the value's and what is added, e.g. ``.name``.
Pack = Callable[[Any, str], Any]
Unpack = Callable[[Any], Any]
Fields = dict[str, Any]


class UnfitError(Exception):
    """A value is of a kind that travels, but would not come back as it is; says why."""


@dataclasses.dataclass(frozen=True)
class ValueKind:
    """One kind of value: its tag, how it is recognized, and its way to JSON and back.

    ``refusals`` are the errors by which ``pack`` says that a value of this kind cannot travel.
    """

    tag: str
    matches: Callable[[Any], bool]
    pack: Callable[[Any, Pack], Fields]
    unpack: Callable[[Fields, Unpack], Any]
    refusals: tuple[type[Exception], ...] = (UnfitError,)


def is_exactly(*kinds: type) -> Callable[[Any], bool]:
    """Return whether a value is of one of these classes: what a derived one adds would be lost."""
    return lambda value: type(value) in kinds


def is_of(module: str, *names: str, or_derived: bool = False) -> Callable[[Any], bool]:
    """Return whether a value is of a class of a module; False while that is not loaded."""

    def matches(value: Any) -> bool:
        loaded = sys.modules.get(module)
        kinds = [getattr(loaded, name, None) for name in names]
        found = tuple(kind for kind in kinds if isinstance(kind, type))
        return isinstance(value, found) if or_derived else type(value) in found

    return matches


def to_text(content: bytes | bytearray) -> str:
    """Bytes as base64 text."""
    return base64.b64encode(content).decode()
