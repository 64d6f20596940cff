"""The process on a host that owns a fork server for the calls of a session: the keeper.

It waits on each host for ten minutes, so it imports neither numpy nor what a worker needs. This
file is imported on the workers' hosts.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pybackend.core.job.codec import decode, encode_line
from pybackend.core.job.job import LOGGER
from pybackend.core.launchers.fork_server import forking_workers
from pybackend.core.launchers.forking import IDLE_SECONDS
from pybackend.core.launchers.hosts.ssh import KEEPER
from pybackend.core.launchers.remote.bundle import LIBRARY
from pybackend.core.machine.processes import name_process
from pybackend.core.net.shared_lines import SharedLines, follow_driver
from pybackend.core.worker import wake_when_orphaned

# A file of the keeper's folder that calls lock while they use it.
_CALLS = "calls"
_LOOK_SECONDS = 2.0
_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Keeper:
    """A keeper: its process, as in `name_process`, and its folder."""

    owner: str
    folder: str


def run_keeper(folder: str, pipe: IO[bytes], channel: int) -> None:
    """Own fork servers until no call uses them for `IDLE_SECONDS`, or ``pipe`` closes.

    Each call has its own connection and folder, which end with the call. A fork server and its
    workers import this package during all of their lives, so its files must outlast the call that
    started the server: the keeper has them in its own folder.
    """
    wake_when_orphaned()
    lines = SharedLines(pipe, os.fdopen(channel, "wb", buffering=0))
    keeper = Keeper(name_process(os.getpid()), folder)
    path, is_over = Path(folder, _CALLS), threading.Event()
    with path.open("wb") as calls:
        lines.write(encode_line(keeper))
        follow_driver(lines, is_over.set)
        used = time.monotonic()
        while not is_over.wait(_LOOK_SECONDS):
            try:
                fcntl.flock(calls, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a call runs
                used = time.monotonic()
                continue
            if time.monotonic() > used + IDLE_SECONDS:
                break
            fcntl.flock(calls, fcntl.LOCK_UN)
        # The workers of a call import files of this folder until they end
        # (test_it_ends_when_it_is_idle_or_turned_off).
        fcntl.flock(calls, fcntl.LOCK_EX)
        path.unlink(missing_ok=True)


@contextmanager
def using_keeper(folder: Path) -> Iterator[None]:
    """Fork the workers of this block from the server of the keeper that a call's bundle names.

    Without a keeper, or if it has ended, workers start as usual.
    """
    with ExitStack() as stack:
        try:
            keeper = decode((folder / KEEPER).read_bytes(), Keeper)
            path = Path(keeper.folder, _CALLS)
            calls = stack.enter_context(path.open("rb"))
            _lock(calls)
            if path.exists():  # else the keeper ends
                # In place of the call's own files, which are equal: all workers of a server must
                # have the same path.
                sys.path[0] = str(Path(keeper.folder, LIBRARY))
                stack.enter_context(forking_workers(owner=keeper.owner))
        except OSError as error:
            LOGGER.debug("the workers are not forked: %s", error)
        yield


def _lock(calls: IO[bytes]) -> None:
    """Lock a file together with other calls; the keeper locks it alone, for a moment."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(calls, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # for long if the keeper is stopped
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
