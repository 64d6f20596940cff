"""Whether the system has ended processes because memory ran out (its OOM killer)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pybackend.launchers.machine import cgroups

_COUNTERS = {"memory.max": "memory.events", "memory.limit_in_bytes": "memory.oom_control"}


def count_oom_kills() -> int:
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
