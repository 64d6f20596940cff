"""Age of the last sign of life of a driver on another machine, whose clock may differ.

A driver counts as lost if its beat does not change while this session watches, for as long as
`LOST_SECONDS`. The first look has nothing to compare with: it takes the beat's age from a clock.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

BEAT_SECONDS = 10.0
"""Seconds between two signs of life of a driver."""
LOST_SECONDS = 120.0
"""On another machine, a driver counts as lost if its last beat is older."""


@dataclass(frozen=True)
class _Seen:
    """A beat that this session saw: first and last time by `time.monotonic`, and its first age."""

    beat: Hashable
    first: float
    last: float
    age: float


_SEEN: dict[str, _Seen] = {}


def age_of_beat(place: str, beat: Hashable, find_age: Callable[[], float]) -> float:
    """Return the age in seconds of the last beat of the job at a path or URI.

    Parameters
    ----------
    beat
        A value that changes with each beat.
    find_age
        Returns the age by clocks that may differ.
    """
    now, seen = time.monotonic(), _SEEN.get(place)
    if seen is None or seen.beat != beat:
        # A beat that changed is not older than the last look.
        age = min(max(0.0, find_age()), now - seen.last if seen else float("inf"))
        seen = _Seen(beat, now, now, age)
    _SEEN[place] = replace(seen, last=now)
    return seen.age + now - seen.first


def watched_seconds(place: str) -> float:
    """Return for how long this session has seen the same beat of a job."""
    seen = _SEEN.get(place)
    return seen.last - seen.first if seen else 0.0


def time_of_disk(folder: Path) -> float:
    """Return the time by the clock that dates the files in a folder, such as a file server's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # read-only
        return time.time()
