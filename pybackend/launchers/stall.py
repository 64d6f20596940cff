"""Distinguish a stopped worker process from one that is merely quiet.

A function may compute or wait for hours without output; its main thread then runs or sleeps. The
system shows other states for a stopped process (SIGSTOP) and one that waits for a frozen disk.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

# As in `ps`: stopped by a signal; waiting for a device. On macOS the latter is U.
_STALLED = {"T": "stopped (by SIGSTOP?)", "D": "stuck on a disk", "U": "stuck on a disk"}
_LOOK_SECONDS = 0.5


class StallWatch:
    """Watches one process; it counts as lost after ``limit`` seconds in such a state."""

    def __init__(self, pid: int, limit: float) -> None:
        self._pid = pid
        self._limit = limit
        self._looked = self._moved = time.monotonic()
        self._known: tuple[str, str] | None = None

    def look(self) -> str | None:
        """Return a message if the process has been stalled for longer than the limit, else None."""
        now = time.monotonic()
        if now < self._looked + min(_LOOK_SECONDS, self._limit / 4):
            return None
        # This process, or its whole machine, may have been stopped too.
        has_rested = now > self._looked + self._limit / 2
        self._looked = now
        found = read_main_thread(self._pid)
        if found is None or found[0] not in _STALLED or found != self._known or has_rested:
            self._known, self._moved = found, now
            return None
        if now < self._moved + self._limit:
            return None
        return f"the process has been {_STALLED[found[0]]} for {now - self._moved:.0f} s"


def read_main_thread(pid: int) -> tuple[str, str] | None:
    """Return state and CPU time of a process's main thread; None if it has exited."""
    try:
        if Path("/proc/self/stat").exists():
            text = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
            values = text.rpartition(")")[2].split()
            return values[0], " ".join(values[11:13])
        shown = subprocess.run(
            ["ps", "-o", "state=,cputime=", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.split()
        return shown[0][0], shown[1]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
