"""All that a process has started, wherever it has gone: found, and ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.01


def adopt_orphans() -> None:
    """Become the parent of any descendant whose own parent ends: none can get away as a daemon.

    Linux only; elsewhere process groups have to do.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def when_orphaned(number: signal.Signals) -> Callable[[], None]:
    """A function after which the system sends this process a signal when its parent ends."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None  # not after a fork

    def ask() -> None:
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, number)

    return ask


def end_descendants(seconds: float, spared: Collection[int] = ()) -> None:
    """Kill all descendants of a process that has adopted orphans, and wait for their end.

    A killed child's own children become children of this process, so each round goes one
    generation deeper. A process that hangs in the system is left to it after some seconds, and
    ``spared`` children are left alone.
    """
    kill_all(lambda: set(children()) - set(spared), seconds, reap)


def kill_all(
    find: Callable[[], Collection[int]],
    seconds: float,
    after: Callable[[Collection[int]], object] = lambda pids: None,
) -> None:
    """Kill the processes that are found, again and again until no more are found or time is up.

    Parameters
    ----------
    after
        Called with the processes that were just killed.
    """
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        after(found)
        time.sleep(_LOOK_SECONDS)


def children() -> list[int]:
    """Process ids of this process's children, those that have ended and wait for it included."""
    own, found = os.getpid(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == own:
                found.append(int(entry.name))
    return found


def reap(pids: Collection[int]) -> None:
    """Take the exit status of those children that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
