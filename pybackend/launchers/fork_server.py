"""The fork server: a process that has imported TensorFlow, from which later workers are forked.

The import takes seconds, which is most of the time of a short training run. So after a call, one
process of the session imports TensorFlow and waits. The workers of the next call are forked from
it, within milliseconds, if they would start in the same way: with the same environment, limits and
user. The server runs no job, so a worker begins as a new process does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pybackend.job.job import LOGGER
from pybackend.launchers.forking import ForkedProcess, attend
from pybackend.launchers.machine import list_gpus
from pybackend.launchers.machine_share import read_free_memory

VARIABLE = "TFDIST_FORK_SERVER"
IDLE_SECONDS = 600.0
_LOOK_SECONDS = 5.0
# Memory that must be free; TensorFlow takes half of it.
_BYTES = 1e9
# Most servers of a session: workers of one call differ if the machine's cores cannot be divided
# evenly among them.
_MOST = 2
_PYTHON = (sys.executable, "-u", "-c")
# Not `python -m`: that would let files of the current directory stand in for real modules.
_RUN = "import runpy; runpy.run_module('pybackend.worker', run_name='__main__', alter_sys=True)"
_START = f"import sys; del sys.path[0]; {_RUN}"
# The server's objects are frozen: collecting garbage in a worker would copy their memory.
_SERVE = (
    "import sys, gc; del sys.path[0]; gc.disable(); "
    "import keras, pybackend.engine.score, pybackend.engine.train; gc.freeze(); gc.enable(); "
    "from pybackend.launchers.fork_server import serve; serve(*map(int, sys.argv[1:])); "
    f"{_RUN}"
)
# Variables that no import reads.
_OWN = ("TMPDIR", "TFDIST_RANK", "TFDIST_HOST")
_LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")
_IS_OFF: ContextVar[bool] = ContextVar("_IS_OFF", default=False)
_OFF = ("0", "false", "no", "off")


def start_worker(
    folder: str, descriptors: Sequence[int], variables: Mapping[str, str], may_fork: bool
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
    """
    if may_fork and (forked := _SERVERS.fork(folder, descriptors, variables)):
        return forked
    return popen([*_PYTHON, _START, folder], descriptors, variables)


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


def keep_fork_server(processes: int = 1) -> None:
    """Have a fork server for workers like those just started, if there is memory for it.

    This raises nothing, because the result of the call that has just ended counts.

    Parameters
    ----------
    processes
        Number of processes on this machine that do the same.
    """
    try:
        _SERVERS.keep(processes)
    except Exception as error:
        LOGGER.debug("no fork server: %s", error)


def stop_fork_server() -> None:
    """Stop the fork server of this process, if there is one."""
    _SERVERS.close()


@contextlib.contextmanager
def without_fork_server() -> Iterator[None]:
    """Have no fork server in this block, because its import of TensorFlow would take time there."""
    _SERVERS.close()
    token = _IS_OFF.set(True)
    try:
        yield
    finally:
        _IS_OFF.reset(token)


class _Server:
    """One fork server, and what is equal for all its workers."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*_PYTHON, _SERVE, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=kind[0],
                    start_new_session=True,
                )
        except BaseException:
            self._control.close()
            raise
        # It ends by itself when it is idle: this thread reaps it.
        threading.Thread(target=self._process.wait, daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

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
        """Kill the server; its workers have guardians of their own."""
        self._control.close()
        self._process.kill()

    def leave(self) -> None:
        """Leave it to the process that this one was forked from."""
        self._control.close()
        self._process.returncode = 0  # not a child of this process


class _Servers:
    """The fork servers of this process."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._running: list[_Server] = []
        self._wanted: list[Any] = []

    def own(self) -> threading.Lock:
        """Return the lock; in a process that was forked from the owner, have no server first."""
        if self._owner != os.getpid():
            for server in self._running:
                server.leave()
            self._reset()
        return self._lock

    def fork(
        self, folder: str, descriptors: Sequence[int], variables: Mapping[str, str]
    ) -> ForkedProcess | None:
        """Fork a worker; None if there is no server for it."""
        if (kind := _describe(variables)) is None:
            return None
        with self.own():
            if kind not in self._wanted:
                self._wanted = [*self._wanted, kind][-_MOST:]
            server = next((server for server in self._running if server.kind == kind), None)
        if server is None:
            return None
        try:
            return server.fork(folder, descriptors, variables)
        except OSError as error:
            LOGGER.debug("the fork server is not used: %s", error)
            server.close()
            with self.own():
                self._running = [other for other in self._running if other is not server]
            return None

    def keep(self, processes: int) -> None:
        """Have a server for each kind of worker that was started since the last time."""
        with self.own():
            wanted, self._wanted = self._wanted, []
            if not wanted or _IS_OFF.get():
                return
            alive = [server for server in self._running if server.is_running]
            self._running = [server for server in alive if server.kind in wanted]
            for server in alive:
                if server not in self._running:
                    server.close()
            known = [server.kind for server in self._running]
            new = [kind for kind in wanted if kind not in known]
            if read_free_memory() >= len(new) * processes * _BYTES:
                self._running += map(_Server, new)

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


def _describe(variables: Mapping[str, str]) -> Any:
    """Return what a worker gets from this process at its start; None if it must not be forked."""
    is_off = os.environ.get(VARIABLE, "").lower() in _OFF
    # What TensorFlow does with a GPU after a fork was not tested.
    if is_off or sys.platform != "linux" or list_gpus(variables):
        return None
    try:
        status = Path("/proc/self/status").read_text()
        umask = next(line for line in status.splitlines() if line.startswith("Umask:"))
        limits = [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in _LIMITS]
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        cores = sorted(os.sched_getaffinity(0))
    except (OSError, StopIteration):
        return None
    users = (os.getresuid(), os.getresgid(), sorted(os.getgroups()))
    fixed = {name: value for name, value in variables.items() if name not in _OWN}
    return fixed, umask, limits, users, priority, cores


def serve(number: int, session: int) -> None:
    """Fork a worker for each request; return in the worker alone.

    The server exits with its session, or when it has been idle for `IDLE_SECONDS`.

    Parameters
    ----------
    number
        File descriptor of the control connection to the session.
    session
        PID of the session. Processes that were forked from it may keep the connection open.
    """
    control = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guardians
    requests = select.poll()
    requests.register(control, select.POLLIN)
    last = time.monotonic()
    while os.getppid() == session and time.monotonic() < last + IDLE_SECONDS:
        if not requests.poll(_LOOK_SECONDS * 1000):
            continue
        first, received, _, _ = socket.recv_fds(control, 1, 1)
        if not first:
            break
        last = time.monotonic()
        with contextlib.closing(socket.socket(fileno=received[0])) as connection:
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                attend(connection, lambda message: os.setsid())
                return
    os._exit(0)
