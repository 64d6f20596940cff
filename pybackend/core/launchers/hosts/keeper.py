"""The keepers of a session: a process on each host that owns a fork server for later calls.

A call that wants a fork server starts them over ssh, if they do not run yet. They end with this
session, because ssh's pipe closes even if the session is killed, or ten minutes after a call.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from pybackend.core.job.job import LOGGER, Job
from pybackend.core.launchers.base import check_stop
from pybackend.core.launchers.fork_server import is_off
from pybackend.core.launchers.hosts.keeper_task import KEEPER
from pybackend.core.launchers.hosts.ssh import HostProcess, HostPython, end_all, find_greeting
from pybackend.core.launchers.remote.bundle import LIBRARY, Bundle
from pybackend.core.net.shared_lines import SharedLines

# A call does not wait longer for a keeper, and starts its workers as usual.
_START_SECONDS = 20.0
_END_SECONDS = 5.0


def find_keepers(
    job: Job, places: Sequence[HostPython], contents: Mapping[str, bytes]
) -> list[dict[str, bytes]]:
    """Return the file of each host's bundle that names its keeper; empty if it has none.

    Parameters
    ----------
    places
        The Python of each host.
    contents
        The bundle's files, of which the keepers get those of this package.
    """
    if is_off():
        _KEEPERS.close()
    # Functions are not forked: see `Child`.
    if is_off() or not job.resources.fork_server or job.kind == "run":
        return [{} for _ in places]
    library = {name: text for name, text in contents.items() if name.startswith(f"{LIBRARY}/")}
    # All start before the first one is waited for.
    try:
        found = [_KEEPERS.find(place, library) for place in places]
    except OSError as error:  # no more processes, for example
        LOGGER.debug("no fork servers: %s", error)
        return [{} for _ in places]
    names = [keeper.name() for keeper in found]
    return [{KEEPER: name} if name else {} for name in names]


class _Keeper(HostProcess):
    """A keeper, and the ssh process on which its life depends."""

    def __init__(self, place: HostPython, library: Mapping[str, bytes]) -> None:
        self._place = place
        self._library = library
        self._name = b""
        self._has_answered = threading.Event()
        self._deadline = time.monotonic() + _START_SECONDS
        super().__init__(place.start("", "hosts.keeper_task", subprocess.DEVNULL))
        threading.Thread(target=self._follow, daemon=True).start()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def has(self, place: HostPython, library: Mapping[str, bytes]) -> bool:
        """Return whether it runs there with this Python and this package."""
        # Compiled code of equal sources may differ.
        ours, theirs = (
            {name: text for name, text in files.items() if not name.endswith(".pyc")}
            for files in (self._library, library)
        )
        return self.is_running() and self._place == place and ours == theirs

    def name(self) -> bytes:
        """Return the line that it has sent, a `Keeper`; empty if it has ended or is slow."""
        while not self._has_answered.wait(0.1) and time.monotonic() < self._deadline:
            check_stop()
        is_whole = self._name.endswith(b"\n")
        return self._name if is_whole and self.is_running() else b""

    def leave(self) -> None:
        """Leave it to the process that this one was forked from."""
        self.let_go()
        self._process.returncode = 0  # not a child of this process

    def _follow(self) -> None:
        """Serve the connection until it ends."""
        assert self._process.stdin is not None
        with (
            contextlib.suppress(OSError, ValueError),
            io.BufferedReader(cast(io.RawIOBase, self._process.stdout)) as reading,
        ):
            lines = SharedLines(reading, self._process.stdin)
            if find_greeting(reading) is not None:
                Bundle(self._library).send(lines.write)
                self._name = reading.readline()
                self._has_answered.set()
                lines.read()  # only signs of life
        self._has_answered.set()
        self.let_go()
        self._process.wait()


class _Keepers:
    """The keepers of this session, by host."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, _Keeper] = {}

    def find(self, place: HostPython, library: Mapping[str, bytes]) -> _Keeper:
        """Return a host's keeper; start it if none runs there with this Python and package."""
        host = place.host
        # Jobs that share the host have different parts of it.
        place = replace(place, host=replace(host, slots=1, first=0, neighbours=None))
        with self._lock:
            known = self._running.get(host.login)
            if known is not None:
                if known.has(place, library):
                    return known
                known.let_go()
            found = self._running[host.login] = _Keeper(place, library)
            return found

    def close(self) -> None:
        """End all keepers."""
        with self._lock:
            running, self._running = list(self._running.values()), {}
        end_all(running, _END_SECONDS)

    def leave(self) -> None:
        """Have no keepers, in a process that was forked from their session."""
        for keeper in self._running.values():
            keeper.leave()
        self._reset()


_KEEPERS = _Keepers()
atexit.register(_KEEPERS.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_KEEPERS.leave)
