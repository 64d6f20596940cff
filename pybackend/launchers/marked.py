"""Processes that a worker has left behind, wherever they have gone: known by their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_LOOK_SECONDS = 0.01
_LIMIT_SECONDS = 2.0


def end_marked(variable: str, value: str) -> None:
    """Kill all processes of this user that have inherited a variable of this value.

    A child may have left its parent's process group (``setsid``), and its parent be gone. Linux
    only: elsewhere process groups have to do. A process that hangs in the system is left to it.
    """
    mark = f"{variable}={value}".encode()
    deadline = time.monotonic() + _LIMIT_SECONDS
    while (found := _find(mark)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def _find(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of other users, or just gone
            if mark in (entry / "environ").read_bytes().split(b"\0") and not _has_ended(entry):
                found.append(int(entry.name))
    return found


def _has_ended(entry: Path) -> bool:
    """Whether a process waits for its parent to take note of its end."""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
