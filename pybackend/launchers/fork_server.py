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
from dataclasses import dataclass
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
# Most servers of a session, for calls in turn that start different workers.
_MOST = 2
# From this time after its start on, no call waits for a server that still imports TensorFlow.
_IMPORT_SECONDS = 20.0
_HUNG_SECONDS = 300.0
_PROGRAM = ("-u", "-c")
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
# Variables that TensorFlow's import sets, in this process or in the worker; None: to any value.
_SET_BY_IMPORT = {
    "ENABLE_RUNTIME_UPTIME_TELEMETRY": "1",
    "HDF5_PLUGIN_PATH": "disable",
    "TF2_BEHAVIOR": "1",
    "TPU_ML_PLATFORM": "Tensorflow",
    "TPU_ML_PLATFORM_VERSION": None,
}
# GPUs of AMD, and those of Windows.
_DEVICES = (Path("/dev/kfd"), Path("/dev/dxg"))
# Lines of /proc/PID/status.
_INHERITED = ("CapEff", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "Umask")
_LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")
_IS_SUSPENDED: ContextVar[bool] = ContextVar("_IS_SUSPENDED", default=False)
_EXPECTS_MORE: ContextVar[bool] = ContextVar("_EXPECTS_MORE", default=False)
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
    if may_fork and (forked := _SERVERS.fork(folder, descriptors, variables)):
        return forked
    return popen([python, *_PROGRAM, _START, folder], descriptors, variables)


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
def keeping_fork_server(processes: int = 1) -> Iterator[None]:
    """Start a fork server after this block for workers like those of the block, if memory allows.

    This raises no error of its own, which would replace the result of the block.

    Parameters
    ----------
    processes
        Number of processes on this machine that do the same.
    """
    try:
        yield
    finally:
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

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *_PROGRAM, _SERVE, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=dict(kind.variables),
                    start_new_session=True,
                )
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
        hangs = not self._is_ready and time.monotonic() > self._started + _HUNG_SECONDS
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
        self._wanted: list[_Kind] = []

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
        """Fork a worker; return None if no server starts such workers."""
        if (kind := _describe(variables)) is None:
            return None
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
        if _is_off():
            self.close()
        with self.own():
            wanted, self._wanted = self._wanted, []
            if not wanted or _is_off():
                return
            alive = [server for server in self._running if server.is_running()]
            for server in self._running:
                if server not in alive:
                    server.close()
            used = [server for server in alive if server.kind in wanted]
            known = [server.kind for server in used]
            # Something may have changed since the workers were started.
            new = [k for k in wanted if k not in known and _describe(k.variables) == k]
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


@dataclass(frozen=True)
class _Kind:
    """All that a worker gets from this process at its start."""

    variables: Mapping[str, str]
    inherited: Any


def _is_off() -> bool:
    return _IS_SUSPENDED.get() or os.environ.get(VARIABLE, "").lower() in _OFF


def _describe(variables: Mapping[str, str]) -> _Kind | None:
    """Return what a worker gets from this process at its start; None if it must not be forked."""
    # What TensorFlow does with a GPU after a fork was not tested.
    numbers = [number for number in list_gpus(variables) if not number.startswith("-")]
    has_gpus = numbers or any(device.exists() for device in _DEVICES)
    if _is_off() or sys.platform != "linux" or has_gpus:
        return None
    try:
        status = Path("/proc/thread-self/status").read_text().splitlines()
        inherited = (
            [line for line in status if line.startswith(_INHERITED)],
            Path("/proc/self/oom_score_adj").read_text(),
            Path("/proc/self/cgroup").read_text(),
            [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in _LIMITS],
            (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
            (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
            sorted(os.sched_getaffinity(0)),
        )
    except OSError:
        return None
    fixed = {name: value for name, value in variables.items() if name not in _OWN}
    for name, value in _SET_BY_IMPORT.items():
        if fixed.get(name) == value or value is None:
            fixed.pop(name, None)
    return _Kind(fixed, inherited)


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
    os.chdir("/")  # the session's directory can be removed; a worker gets its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guardians
    with contextlib.suppress(OSError):  # the session has ended
        control.sendall(b"r")
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
