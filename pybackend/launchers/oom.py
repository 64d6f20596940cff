"""Whether the system has ended processes because memory ran out (its OOM killer)."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path

from pybackend.launchers.machine import cgroups

_COUNTERS = {"memory.max": "memory.events", "memory.limit_in_bytes": "memory.oom_control"}


# Between two looks at the counters; how long before a process is seen to be gone a kill may count.
_LOOK_SECONDS = 0.5
_LATEST_SECONDS = 1.0


class OomWatch:
    """Tells a kill that the system has made just now from those of other processes before."""

    def __init__(self) -> None:
        self._seen = deque([(time.monotonic(), _count_kills())])

    def look(self) -> None:
        """Note the counters, now and then while the process lives."""
        now = time.monotonic()
        if now - self._seen[-1][0] < _LOOK_SECONDS:
            return
        self._seen.append((now, _count_kills()))
        while now - self._seen[1][0] >= _LATEST_SECONDS:
            self._seen.popleft()

    def has_killed(self) -> bool:
        """Whether the system has ended a process, now that one is seen to be gone."""
        return _count_kills() > self._seen[0][1]


def _count_kills() -> int:
    """Kills so far that the system counts for the machine and for this process's control group.

    It counts before it kills: once a process is seen to be gone, its kill is in the number.
    """
    files = {folder / _COUNTERS[limit] for folder, limit in cgroups()}
    return sum(map(_read, [Path("/proc/vmstat"), *files]))


def _read(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
