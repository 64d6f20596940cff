"""Detect processes that the system's OOM killer ended because memory ran out."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path

from pybackend.launchers.machine import cgroups

_COUNTERS = {"memory.max": "memory.events", "memory.limit_in_bytes": "memory.oom_control"}

# Interval of reading the counters; most time between a kill and when it is noticed.
_LOOK_SECONDS = 0.5
_LATEST_SECONDS = 1.0


class OomWatch:
    """Distinguishes a kill just now from earlier kills of other processes."""

    def __init__(self) -> None:
        self._seen = deque([(time.monotonic(), _count_kills())])

    def look(self) -> None:
        """Record the counters; call it repeatedly while the process runs."""
        now = time.monotonic()
        if now - self._seen[-1][0] < _LOOK_SECONDS:
            return
        self._seen.append((now, _count_kills()))
        while now - self._seen[1][0] >= _LATEST_SECONDS:
            self._seen.popleft()

    def has_killed(self) -> bool:
        """Return whether the system has just killed a process; call it after one has exited."""
        return _count_kills() > self._seen[0][1]


def _count_kills() -> int:
    """Return the system's count of kills for the machine and this process's control group.

    The system counts before it kills: the kill of a process that has exited is included.
    """
    files = {folder / _COUNTERS[limit] for folder, limit in cgroups()}
    return sum(map(_read, [Path("/proc/vmstat"), *files]))


def _read(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
