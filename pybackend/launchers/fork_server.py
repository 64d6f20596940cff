"""The fork server: a process that has imported TensorFlow, from which later workers are forked.

The import takes seconds, which is most of the time of a short training run. So after a call, one
process of the session imports TensorFlow and waits. The workers of the next call are forked from
it, within milliseconds, if they would start in the same way: with the same environment, limits and
user. The server runs no job, so a worker begins as a new process does: it has the same imports, but
random numbers of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

from pybackend.job.job import LOGGER
from pybackend.launchers.fork_serving import (
    HUNG_SECONDS,
    PROGRAM,
    RUN_WORKER,
    start_server,
)
from pybackend.launchers.forking import ForkedProcess
from pybackend.launchers.lasting_server import LastingServer
from pybackend.launchers.worker_kind import WorkerKind, describe_worker
from pybackend.machine.capacity import read_free_memory
from pybackend.machine.processes import name_process

VARIABLE = "TFDIST_FORK_SERVER"
# Memory that must be free; TensorFlow takes half of it.
_BYTES = 1e9
# Most servers of a session, for calls in turn that start different workers.
_MOST = 2
# From this time after its start on, no call waits for a server that still imports TensorFlow.
_IMPORT_SECONDS = 20.0
_START = f"import sys; del sys.path[0]; {RUN_WORKER}"
_IS_SUSPENDED: ContextVar[bool] = ContextVar("_IS_SUSPENDED", default=False)
_EXPECTS_MORE: ContextVar[bool] = ContextVar("_EXPECTS_MORE", default=False)
_LASTING: ContextVar[LastingServer | None] = ContextVar("_LASTING", default=None)
_OFF = ("0", "false", "no", "off")


def start_worker(
    folder: str,
    descriptors: Sequence[int],
    variables: Mapping[str, str],
    may_fork: bool,
    python: str = sys.executable,
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a worker's process: fork it if this session has a fork server for it.

    Parameters
    ----------
    folder
        The worker's folder.
    descriptors
        The worker's listening socket and its pipe for events.
    variables
        The worker's environment.
    may_fork
        Whether TensorFlow may already be imported when the worker starts.
    python
        The Python that is started, unless the worker is forked.
    """
    kind = describe_worker(variables, python) if may_fork and not is_off() else None
    if kind is not None:
        lasting = _LASTING.get()
        fork = _SERVERS.fork if lasting is None else lasting.fork
        if forked := fork(kind, folder, descriptors, variables):
            return forked
    return popen([python, *PROGRAM, _START, folder], descriptors, variables)


def popen(
    command: Sequence[str], descriptors: Sequence[int], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, which inherits ``descriptors``, its last arguments."""
    return subprocess.Popen(
        [*command, *map(str, descriptors)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        env=variables,
        start_new_session=True,
    )


@contextlib.contextmanager
def keeping_fork_server(processes: int = 1, owner: str | None = None) -> Iterator[None]:
    """Start a fork server after this block for workers like those of the block, if memory allows.

    This raises no error of its own, which would replace the result of the block.

    Parameters
    ----------
    processes
        Number of processes on this machine that do the same.
    owner
        The process with which the server ends, as in `name_process`. Other processes with the same
        owner use it, too. None: this process, which alone uses it.
    """
    lasting = None if owner is None else LastingServer(owner)
    token = _LASTING.set(lasting)
    try:
        yield
    finally:
        _LASTING.reset(token)
        try:
            if lasting is None:
                _SERVERS.keep(processes)
            elif read_free_memory() >= processes * _BYTES:
                lasting.keep()
        except Exception as error:
            LOGGER.debug("no fork server: %s", error)


def stop_fork_server() -> None:
    """Stop the fork server of this process, if there is one."""
    _SERVERS.close()


@contextlib.contextmanager
def without_fork_server() -> Iterator[None]:
    """Have no fork server in this block, because its import of TensorFlow would take time there."""
    _SERVERS.close()
    token = _IS_SUSPENDED.set(True)
    try:
        yield
    finally:
        _IS_SUSPENDED.reset(token)


@contextlib.contextmanager
def expecting_workers() -> Iterator[None]:
    """Start a fork server before the first worker of this block, because many equal ones follow."""
    token = _EXPECTS_MORE.set(True)
    try:
        yield
    finally:
        _EXPECTS_MORE.reset(token)


class _Server:
    """One fork server, and what is equal for all its workers."""

    def __init__(self, kind: WorkerKind) -> None:
        self.kind = kind
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = start_server(kind, theirs, name_process(os.getpid()))
        except BaseException:
            self._control.close()
            raise
        self._started = time.monotonic()
        self._is_ready = False
        self._lock = threading.Lock()
        # It ends by itself when it is idle: this thread reaps it.
        threading.Thread(target=self._process.wait, daemon=True).start()

    def is_running(self) -> bool:
        """Return whether it runs, and does not hang while it imports TensorFlow."""
        hangs = not self._is_ready and time.monotonic() > self._started + HUNG_SECONDS
        return self._process.poll() is None and not hangs

    def is_ready(self) -> bool:
        """Return whether it has imported TensorFlow; wait for it if it has just been started.

        Raises
        ------
        OSError
            It has ended.
        """
        with self._lock:
            if not self._is_ready:
                left = max(0.0, self._started + _IMPORT_SECONDS - time.monotonic())
                answers = select.poll()
                answers.register(self._control, select.POLLIN)
                if not answers.poll(left * 1000):
                    return False
                if not self._control.recv(1):
                    raise ConnectionError("the fork server has ended")
                self._is_ready = True
            return True

    def fork(
        self, folder: str, descriptors: Sequence[int], variables: Mapping[str, str]
    ) -> ForkedProcess:
        """Fork a worker; raise OSError if the server has ended, or does not answer."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ForkedProcess(ours, descriptors, variables, [folder])

    def close(self) -> None:
        """Kill the server, and wait for its memory to be free; its workers have guardians."""
        self._control.close()
        self._process.kill()
        # A process that waits for a frozen disk cannot be killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)

    def leave(self) -> None:
        """Leave it to the process that this one was forked from."""
        # At its exit, a fork of the session would kill the session's server
        # (test_one_that_ends_hangs_or_differs_is_replaced_and_a_fork_does_not_use_it).
        self._control.close()
        self._process.returncode = 0  # not a child of this process


class _Servers:
    """The fork servers of this process, the last used first."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._running: list[_Server] = []
        self._wanted: list[WorkerKind] = []

    def own(self) -> threading.Lock:
        """Return the lock; in a process that was forked from the owner, have no server first."""
        if self._owner != os.getpid():
            for server in self._running:
                server.leave()
            self._reset()
        return self._lock

    def fork(
        self,
        kind: WorkerKind,
        folder: str,
        descriptors: Sequence[int],
        variables: Mapping[str, str],
    ) -> ForkedProcess | None:
        """Fork a worker; return None if no server starts such workers."""
        with self.own():
            if kind not in self._wanted:
                self._wanted = [kind, *self._wanted][:_MOST]
            server = next((server for server in self._running if server.kind == kind), None)
            is_wanted = server is None and _EXPECTS_MORE.get() and len(self._running) < _MOST
            if is_wanted and read_free_memory() >= _BYTES:
                server = _Server(kind)
                self._running = [server, *self._running]
        if server is None:
            return None
        try:
            return server.fork(folder, descriptors, variables) if server.is_ready() else None
        except OSError as error:
            LOGGER.debug("the fork server is not used: %s", error)
            with self.own():
                self._running = [other for other in self._running if other is not server]
            server.close()
            return None

    def keep(self, processes: int) -> None:
        """Have a server for each kind of worker that was started since the last time."""
        if is_off():
            self.close()
        with self.own():
            wanted, self._wanted = self._wanted, []
            if not wanted or is_off():
                return
            alive = [server for server in self._running if server.is_running()]
            for server in self._running:
                if server not in alive:
                    server.close()
            used = [server for server in alive if server.kind in wanted]
            known = [server.kind for server in used]
            # Something may have changed since the workers were started.
            new = [
                k for k in wanted if k not in known and describe_worker(k.variables, k.python) == k
            ]
            others = [server for server in alive if server not in used]
            least = len(new) * processes * _BYTES
            while others and (len(used + new + others) > _MOST or read_free_memory() < least):
                others.pop().close()
            self._running = [*used, *others]
            if new and read_free_memory() >= least:
                self._running = [*map(_Server, new), *self._running]

    def close(self) -> None:
        """Stop all servers."""
        with self.own():
            running, self._running = self._running, []
        for server in running:
            server.close()


_SERVERS = _Servers()
atexit.register(_SERVERS.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SERVERS.own)


def is_off() -> bool:
    """Return whether this session has no fork servers."""
    return _IS_SUSPENDED.get() or os.environ.get(VARIABLE, "").lower() in _OFF
