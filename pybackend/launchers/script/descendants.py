"""Find and end all descendants of a process."""

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
    """Become the parent of any descendant whose own parent ends, so that no daemon escapes.

    Linux only; elsewhere only process groups are ended.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def when_orphaned(number: signal.Signals) -> Callable[[], None]:
    """Return a function that makes the system signal this process when its parent ends."""
    library = (
        ctypes.CDLL(None) if sys.platform == "linux" else None
    )  # must not be loaded after a fork

    def ask() -> None:
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, number)

    return ask


def end_descendants(seconds: float, spared: Collection[int] = ()) -> None:
    """Kill all descendants of a process that has adopted orphans, and wait for their end.

    A killed child's own children become children of this process, so each round goes one
    generation deeper. A process that hangs in the kernel is given up after some seconds, and
    ``spared`` children are not killed.
    """
    kill_all(lambda: set(children()) - set(spared), seconds, reap)


def kill_all(
    find: Callable[[], Collection[int]],
    seconds: float,
    after: Callable[[Collection[int]], object] = lambda pids: None,
) -> None:
    """Find and kill processes repeatedly until none is found or the time is over.

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
    """Return the process IDs of this process's children, including zombies."""
    own, found = os.getpid(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == own:
                found.append(int(entry.name))
    return found


def reap(pids: Collection[int]) -> None:
    """Reap the children that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
