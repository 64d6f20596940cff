"""Spare workers: processes that have imported TensorFlow and wait for the session's next call.

The import takes seconds, which is most of the time of a short training run. So after a call, one
process per worker imports TensorFlow and waits. The next call uses it as a new worker, once, if it
sets the same environment variables.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pybackend.job.resources import read_meminfo
from pybackend.launchers.machine import read_memory

VARIABLE = "TFDIST_SPARES"
# Memory that must be free for each; TensorFlow takes half of it.
_BYTES = 1e9
# Set when a spare worker is used.
_OWN = ("TMPDIR", "TFDIST_RANK", "TFDIST_HOST")
_MOST = 64
_PYTHON = (sys.executable, "-u", "-c")
# Not `python -m`: that would let files of the current directory stand in for real modules.
_RUN = "import runpy; runpy.run_module('pybackend.worker', run_name='__main__', alter_sys=True)"
_START = f"import sys; del sys.path[0]; {_RUN}"
_STAND_BY = (
    "import sys; del sys.path[0]; "
    "from pybackend.engine.stand_by import stand_by; stand_by(int(sys.argv[1])); "
    f"{_RUN}"
)


@dataclass(frozen=True)
class _Spare:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    variables: Mapping[str, str]

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.communicate()


class _Spares:
    """The spare workers of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Spare] = []
        self._wanted: deque[dict[str, str]] = deque(maxlen=_MOST)

    def take(self, variables: Mapping[str, str]) -> _Spare | None:
        """Return a spare worker with these variables, apart from those that differ by worker."""
        common = _leave_out_own(variables)
        with self._lock:
            self._wanted.append(common)
            for spare in list(self._waiting):
                if spare.process.poll() is not None:
                    self._waiting.remove(spare)
                    spare.close()
                elif spare.variables == common:
                    self._waiting.remove(spare)
                    return spare
        return None

    def refill(self, count: int) -> None:
        """Start spares for the last ``count`` workers that were started, and stop all others."""
        with self._lock:
            wanted = list(self._wanted)[-count:]
            self._wanted.clear()
            unused, self._waiting = self._waiting, []
            for variables in wanted:
                same = next((s for s in unused if s.variables == variables), None)
                if same is not None:
                    unused.remove(same)
                self._waiting.append(same or _start(variables))
            for spare in unused:
                spare.close()

    def close(self) -> None:
        """Stop all spare workers."""
        with self._lock:
            for spare in self._waiting:
                spare.close()
            self._waiting = []

    def forget(self) -> None:
        """Leave the spare workers to the process that this one was forked from."""
        self._lock = threading.Lock()
        for spare in self._waiting:
            spare.connection.close()
            spare.process.returncode = 0  # not a child of this process
        self._waiting = []
        self._wanted.clear()


_SPARES = _Spares()
atexit.register(_SPARES.close)
os.register_at_fork(after_in_child=_SPARES.forget)


def start_python(
    folder: str, descriptors: Sequence[int], variables: Mapping[str, str], may_be_spare: bool
) -> subprocess.Popen[bytes]:
    """Start a worker process, or use a spare one with the same environment.

    Parameters
    ----------
    folder
        The worker's folder.
    descriptors
        The worker's listening socket and its pipe for events.
    variables
        The worker's environment.
    may_be_spare
        Whether TensorFlow may already be imported.
    """
    if may_be_spare and _is_on() and (spare := _SPARES.take(variables)):
        message = {"environment": dict(variables), "directory": os.getcwd(), "folder": folder}
        with spare.connection as connection, contextlib.suppress(OSError):  # it has just exited
            socket.send_fds(connection, [b"."], descriptors)
            connection.sendall(json.dumps(message).encode())
            return spare.process
        spare.close()
    return popen([*_PYTHON, _START, folder, *map(str, descriptors)], descriptors, variables)


def keep_spares(count: int) -> None:
    """Start spare workers for the next call, as many as the last one had, if memory suffices."""
    # A container may have less than its machine.
    free = min(read_meminfo("MemAvailable"), read_memory() / 2)
    if not _is_on() or free < count * _BYTES:
        _SPARES.close()
    else:
        _SPARES.refill(count)


def _is_on() -> bool:
    return os.environ.get(VARIABLE, "1") != "0"


def _leave_out_own(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in _OWN}


def _start(variables: Mapping[str, str]) -> _Spare:
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        process = popen([*_PYTHON, _STAND_BY, str(number)], [number], variables)
    return _Spare(process, ours, variables)


def popen(
    command: Sequence[str], descriptors: Sequence[int], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, which inherits ``descriptors``."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        env=variables,
        start_new_session=True,
    )
