"""Changes in this process that last while any call needs them: trainings may run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

_Before = TypeVar("_Before")


@dataclass
class _Change(Generic[_Before]):
    """What was there before, and how many calls need the change."""

    before: _Before
    users: int = 0


_changes: dict[tuple[str, int], _Change[object]] = {}
_lock = threading.Lock()


@contextmanager
def hold(
    name: str, owner: object, change: Callable[[], _Before], restore: Callable[[_Before], None]
) -> Iterator[None]:
    """Make a change for the first of several calls at once, and undo it after the last.

    Parameters
    ----------
    name, owner
        What is changed, and on what; the owner lives for as long as the block.
    change
        Makes the change, at once: other calls wait. Returns what was there before.
    restore
        Is given what was there before.
    """
    key = name, id(owner)
    with _lock:
        if key not in _changes:
            _changes[key] = _Change(change())
        _changes[key].users += 1
    try:
        yield
    finally:
        with _lock:
            held = _changes[key]
            held.users -= 1
            if not held.users:
                restore(_changes.pop(key).before)  # type: ignore[arg-type]
