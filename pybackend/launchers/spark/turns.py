"""Trainings of this process that share a session: one waits until the others leave it slots.

Spark would start to wait by itself, but a job none of whose tasks runs counts as stuck after a
minute.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_changed = threading.Condition()
_taken: dict[int, int] = {}
_waiting: deque[object] = deque()


@contextmanager
def take_slots(owner: object, workers: int, slots: int) -> Iterator[None]:
    """Wait for so many of a session's slots, and keep them for the block; first come, first served.

    Parameters
    ----------
    owner
        What has the slots: a SparkContext or a Connect session.
    slots
        All that there are; at least ``workers``.
    """
    key, turn = id(owner), object()
    with _changed:
        _waiting.append(turn)
        try:
            _changed.wait_for(lambda: _waiting[0] is turn and _taken.get(key, 0) + workers <= slots)
        finally:  # also on Ctrl-C
            _waiting.remove(turn)
            _changed.notify_all()
        _taken[key] = _taken.get(key, 0) + workers
    try:
        yield
    finally:
        with _changed:
            _taken[key] -= workers
            if not _taken[key]:
                del _taken[key]
            _changed.notify_all()
