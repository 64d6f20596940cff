"""Trainings of this process that take turns: one waits until others leave it a session's slots.

Only those take part that may run beside others, such as the fits of a `CrossValidator`. Spark would
let them wait by itself, but it starts no check of the network and no shuffle without a slot, and a
job none of whose tasks runs counts as stuck after a minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# How long a wait goes without a word.
_QUIET_SECONDS = 10.0


@dataclass(eq=False)
class _Turn:
    """A call that holds slots, or waits for them."""

    workers: int
    began: float = field(default_factory=time.monotonic)
    holds: bool = False


_changed = threading.Condition()
# By the identity of their owner, which lives as long as any of its turns; as they came.
_turns: dict[int, list[_Turn]] = {}


@contextmanager
def take_slots(
    owner: object, workers: int, slots: int, on_wait: Callable[[str], object]
) -> Iterator[None]:
    """Wait for so many of a session's slots, and keep them for the block; first come, first served.

    Parameters
    ----------
    owner
        What has the slots: a SparkContext or a Connect session. Calls of others are not waited for.
    slots
        All that there are; at least ``workers``.
    on_wait
        Told once, in words, what holds the slots, if the wait is long.
    """
    key, turn = id(owner), _Turn(workers)

    def is_next() -> bool:
        ahead = _turns[key][: _turns[key].index(turn)]
        return all(one.holds for one in ahead) and (
            sum(one.workers for one in ahead) + workers <= slots
        )

    def wait_for_turn(seconds: float | None) -> str:
        """Empty if the slots are taken now; else what holds them."""
        with _changed:
            turn.holds = _changed.wait_for(is_next, seconds)
            return "" if turn.holds else _describe(_turns[key], turn, slots)

    with _changed:
        _turns.setdefault(key, []).append(turn)
    try:
        if reason := wait_for_turn(_QUIET_SECONDS):
            on_wait(reason)
            wait_for_turn(None)
        yield
    finally:  # also on Ctrl-C
        with _changed:
            _turns[key].remove(turn)
            if not _turns[key]:
                del _turns[key]
            _changed.notify_all()


def _describe(turns: list[_Turn], turn: _Turn, slots: int) -> str:
    now = time.monotonic()
    ahead = turns[: turns.index(turn)]
    held = ", ".join(f"workers={t.workers} for {now - t.began:.0f} s" for t in ahead if t.holds)
    queued = sum(not t.holds for t in ahead)
    return (
        f"a training waits for {turn.workers} of the session's {slots} slots: other trainings of "
        f"this process hold them ({held}){f', and {queued} wait before it' if queued else ''}"
    )
