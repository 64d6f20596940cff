"""Watches on a worker's process: its memory, kills for lack of memory, and whether it is stopped.

Control groups could limit memory at the system level, but they need privileges that workers started
by Spark, ssh and Slurm rarely have, and they remain if a launcher is killed. So memory is summed
over processes here.

A function may compute or wait for hours without output; its main thread is then running or
sleeping. The system shows different states for a stopped process (SIGSTOP) and for one that is
waiting for a frozen disk.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path

from pybackend.core.machine import processes
from pybackend.core.machine.capacity import list_control_groups

_LOOK_SECONDS = 0.1
# Searching for new processes reads a file of every process on the machine.
_SEARCH_SECONDS = 0.5


class MemoryWatch:
    """Watch on a process that leads a session; ``limit`` is in bytes, None for no limit."""

    def __init__(self, pid: int, limit: int | None) -> None:
        self._pid = pid
        self._limit = limit
        self._looked = self._searched = float("-inf")
        self._known: Collection[int] = [pid]

    def look(self) -> int | None:
        """Return the number of bytes in use if it exceeds the limit, else None."""
        now = time.monotonic()
        if self._limit is None or now < self._looked + _LOOK_SECONDS:
            return None
        self._looked = now
        if not Path("/proc/self/stat").exists():
            used = processes.measure_group(self._pid)
        else:
            if now > self._searched + _SEARCH_SECONDS:
                self._known, self._searched = processes.find_family(self._pid), now
            used = sum(map(processes.measure_memory, self._known))
            # Pages shared by forked processes count once; reading that is slower.
            if used > self._limit and len(self._known) > 1:
                used = sum(map(processes.measure_share, self._known))
        return used if used > self._limit else None


# Files of a memory control group, by its version.
_COUNTERS = {2: "memory.events", 1: "memory.oom_control"}
# Interval of reading the counters; most time between a kill and when it is noticed. When all kills
# since the start counted, a `kill -9` was reported as lack of memory hours after the system had
# killed some other process of the machine.
_OOM_LOOK_SECONDS = 0.5
_LATEST_SECONDS = 1.0


class OomWatch:
    """Watch that distinguishes a new out-of-memory kill from earlier kills of other processes."""

    def __init__(self) -> None:
        self._seen = deque([(time.monotonic(), _count_kills())])

    def look(self) -> None:
        """Record the counters; call it repeatedly while the process runs."""
        now = time.monotonic()
        if now - self._seen[-1][0] < _OOM_LOOK_SECONDS:
            return
        self._seen.append((now, _count_kills()))
        while now - self._seen[1][0] >= _LATEST_SECONDS:
            self._seen.popleft()

    def has_killed(self) -> bool:
        """Return whether the system has just killed a process; call it after one has exited."""
        return _count_kills() > self._seen[0][1]


def _count_kills() -> int:
    """Return the system's count of kills for the machine and this process's control group."""
    # The system counts before it kills: once a killed process has exited, it is included.
    files = {folder / _COUNTERS[version] for version, folder in list_control_groups("memory")}
    return sum(map(_read, [Path("/proc/vmstat"), *files]))


def _read(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# As in `ps`: stopped by a signal; waiting for a device. On macOS the latter is U.
_STALLED = {
    "T": "stopped (by SIGSTOP?)",
    "D": "stuck on a disk",
    "U": "stuck on a disk",
    "Z": "a zombie, whose parent process is stopped (by SIGSTOP?),",
}
_STALL_LOOK_SECONDS = 0.5


class StallWatch:
    """Watch on one process, which counts as lost once it has stalled for ``limit`` seconds."""

    def __init__(self, pid: int, limit: float) -> None:
        self._pid = pid
        self._limit = limit
        self._looked = self._moved = time.monotonic()
        self._known: tuple[str, str] | None = None

    def look(self) -> str | None:
        """Return a message if the process has been stalled for longer than the limit, else None."""
        now = time.monotonic()
        if now < self._looked + min(_STALL_LOOK_SECONDS, self._limit / 4):
            return None
        # This process, or its whole machine, may have been stopped too: a worker that was resumed
        # together with it is not lost (test_a_watcher_that_was_stopped_itself_counts_from_then_on).
        has_rested = now > self._looked + self._limit / 2
        self._looked = now
        found = processes.read_main_thread(self._pid)
        if found is None or found[0] not in _STALLED or found != self._known or has_rested:
            self._known, self._moved = found, now
            return None
        if now < self._moved + self._limit:
            return None
        return f"the process has been {_STALLED[found[0]]} for {now - self._moved:.0f} s"
