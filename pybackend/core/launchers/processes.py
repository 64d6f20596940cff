"""Kill the processes that a worker has started, and recognize stopped ones.

A function may compute or wait for hours without output; its main thread is then running or
sleeping. The system shows different states for a stopped process (SIGSTOP) and for one that is
waiting for a frozen disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from functools import partial

from pybackend.core.machine.processes import (
    list_children,
    list_processes,
    read_main_thread,
    read_variables,
)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.01


def adopt_orphans() -> None:
    """Become the parent of any descendant whose own parent ends, so that no daemon escapes.

    Linux only; elsewhere only process groups are killed.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group, unless it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def name_signal(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


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
    """Kill all descendants of a process that has adopted orphans, and wait for them to end.

    A killed child's own children become children of this process, so each round goes one generation
    deeper. The wait for a process that hangs in the kernel ends after a few seconds, and ``spared``
    children are not killed.
    """
    kill_all(lambda: set(list_children()) - set(spared), seconds, reap)


def kill_all(
    find: Callable[[], Collection[int]],
    seconds: float,
    after: Callable[[Collection[int]], object] = lambda pids: None,
) -> None:
    """Find and kill processes repeatedly until none are found or time runs out.

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


def reap(pids: Collection[int]) -> None:
    """Reap the children that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


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
        found = read_main_thread(self._pid)
        if found is None or found[0] not in _STALLED or found != self._known or has_rested:
            self._known, self._moved = found, now
            return None
        if now < self._moved + self._limit:
            return None
        return f"the process has been {_STALLED[found[0]]} for {now - self._moved:.0f} s"


_LIMIT_SECONDS = 2.0


def end_marked(variable: str, value: str) -> None:
    """Kill all of this user's processes that inherited an environment variable with this value.

    A child may have left its parent's process group (``setsid``), and its parent may have exited.
    Linux only: elsewhere only process groups are killed. This does not wait for a process that
    hangs in the kernel.
    """
    kill_all(partial(_find, f"{variable}={value}".encode()), _LIMIT_SECONDS)


def _find(mark: bytes) -> list[int]:
    found = []
    for pid in list_processes():
        with contextlib.suppress(OSError):  # of other users, or just exited
            if mark in read_variables(pid):
                found.append(pid)
    # One that has ended may wait for its parent.
    states = {pid: read_main_thread(pid) for pid in found}
    return [pid for pid, state in states.items() if state is not None and state[0] != "Z"]
