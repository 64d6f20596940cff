"""Queue of this process's trainings for the slots of a session.

Only trainings that may run concurrently use it, such as the fits of a `CrossValidator`. Spark would
queue them itself, but it starts neither the network check nor a shuffle without a slot, and a job
without a running task counts as stuck after a minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Time of a wait before it is reported.
_QUIET_SECONDS = 10.0


@dataclass(eq=False)
class _Turn:
    """Call that holds slots, or waits for them."""

    workers: int
    began: float = field(default_factory=time.monotonic)
    holds: bool = False


_changed = threading.Condition()
# By the id of their owner, which outlives its turns; in the order of arrival.
_turns: dict[int, list[_Turn]] = {}


@contextmanager
def take_slots(
    owner: object, workers: int, slots: int, on_wait: Callable[[str], object]
) -> Iterator[None]:
    """Wait for some of a session's slots, and hold them during the block; first come, first served.

    Parameters
    ----------
    owner
        SparkContext or Connect session that has the slots. Other owners have separate queues.
    workers
        Number of slots to wait for.
    slots
        Number of all slots; at least ``workers``.
    on_wait
        If the wait is long, called once with a description of what holds the slots.
    """
    key, turn = id(owner), _Turn(workers)

    def is_next() -> bool:
        ahead = _turns[key][: _turns[key].index(turn)]
        return all(one.holds for one in ahead) and (
            sum(one.workers for one in ahead) + workers <= slots
        )

    def wait_for_turn(seconds: float | None) -> str:
        """Return an empty text if this call now holds its slots, else what holds them."""
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
