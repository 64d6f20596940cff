"""Choice of the Python that the tasks of a session run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pybackend.launchers.spark.session import is_connect
from pybackend.launchers.spark.slots import is_one_machine

_Before = TypeVar("_Before")


@contextmanager
def driver_python(session: Any) -> Iterator[None]:
    """On one machine, run the workers with the driver's Python unless another was chosen."""
    if is_connect(session) or not is_one_machine(session):
        yield
        return
    context = session.sparkContext

    def choose() -> str:
        before = str(context.pythonExec)
        if before == "python3":
            context.pythonExec = sys.executable
        return before

    def restore(before: str) -> None:
        context.pythonExec = before

    with hold("python", context, choose, restore):
        yield


@dataclass
class _Change(Generic[_Before]):
    """Previous value, and the number of calls that need the change."""

    before: _Before
    users: int = 0


_changes: dict[tuple[str, int], _Change[object]] = {}
_lock = threading.Lock()


@contextmanager
def hold(
    name: str, owner: object, change: Callable[[], _Before], restore: Callable[[_Before], None]
) -> Iterator[None]:
    """Make a change for the first of several concurrent calls, and undo it after the last.

    Parameters
    ----------
    name, owner
        Name of the change, and its object, which must live as long as the block.
    change
        Makes the change without delay, as other calls wait. Returns the previous value.
    restore
        Receives the previous value.
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
