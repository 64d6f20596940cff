"""Processes that a worker left behind, identified by an environment variable."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from pybackend.launchers.script.descendants import kill_all
from pybackend.launchers.stall import read_main_thread

_LIMIT_SECONDS = 2.0


def end_marked(variable: str, value: str) -> None:
    """Kill all processes of this user that inherited a variable with this value.

    A child may have left its parent's process group (``setsid``), and its parent may have exited.
    Linux only: elsewhere only process groups are killed. A process that hangs in the kernel is not
    waited for.
    """
    kill_all(partial(_find, f"{variable}={value}".encode()), _LIMIT_SECONDS)


def _find(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of other users, or just exited
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    # One that has ended may wait for its parent.
    states = {pid: read_main_thread(pid) for pid in found}
    return [pid for pid, state in states.items() if state is not None and state[0] != "Z"]
