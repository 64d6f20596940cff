"""Fork servers: processes that have imported TensorFlow, from which later workers are forked.

The import takes seconds, which is most of the time of a short training run. So after a call, a
process imports TensorFlow and waits. The workers of the next call are forked from it, within
milliseconds, if they would start in the same way: with the same environment, limits and user. The
server runs no job, so a worker begins as a new process does: it has the same imports, but random
numbers of its own.

A server belongs to a process, its owner, and ends with it: this session, a Spark executor, or the
keeper of a session on a host. The owner's processes, such as the tasks of an executor, find it by a
name in Linux's abstract namespace of sockets, where no file is left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pybackend.core.launchers.forking as forking
from pybackend.core.job.job import LOGGER
from pybackend.core.launchers.base import holding
from pybackend.core.machine.capacity import list_gpus, read_free_memory
from pybackend.core.machine.processes import name_process

VARIABLE = "TFDIST_FORK_SERVER"
# Memory that must be free; TensorFlow takes half of it.
_BYTES = 1e9
# Most servers of a session, for calls in turn that start different workers.
_MOST = 2
# From this time after its start on, no call waits for a server that still imports TensorFlow.
_IMPORT_SECONDS = 20.0
_END_SECONDS = 2.0
_START = f"import sys; del sys.path[0]; {forking.RUN_WORKER}"
_IS_SUSPENDED: ContextVar[bool] = ContextVar("_IS_SUSPENDED", default=False)
_EXPECTS_MORE: ContextVar[bool] = ContextVar("_EXPECTS_MORE", default=False)
_OWNER: ContextVar[str | None] = ContextVar("_OWNER", default=None)
_OFF = ("0", "false", "no", "off")


def start_worker(
    folder: str,
    descriptors: Sequence[int],
    variables: Mapping[str, str],
    may_fork: bool,
    python: str = sys.executable,
) -> subprocess.Popen[bytes] | forking.ForkedProcess:
    """Start a worker's process: fork it if there is a fork server for it, else run ``python``.

    It inherits ``descriptors``, its listening socket and its pipe for events. ``may_fork`` is
    whether TensorFlow may already be imported when it starts.
    """
    kind = describe_worker(variables, python) if may_fork and not is_off() else None
    if kind is not None:
        servers = _find_servers(_OWNER.get())
        if forked := servers.fork(kind, folder, descriptors, variables):
            return forked
    return popen([python, *forking.PROGRAM, _START, folder], descriptors, variables)


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

    This raises no error of its own, which would replace the result of the block. ``processes`` is
    the number of processes on this machine that do the same. The server ends with ``owner``, as in
    `name_process`, and other processes with this owner use it, too; None: this process alone.
    """
    try:
        with holding(_OWNER, owner):
            yield
    finally:
        try:
            _find_servers(owner).keep(processes)
        except Exception as error:
            LOGGER.debug("no fork server: %s", error)


def stop_fork_server() -> None:
    with contextlib.suppress(OSError):  # this is not Linux
        _find_servers(None).close()


@contextlib.contextmanager
def without_fork_server() -> Iterator[None]:
    """Have no fork server in this block, because its import of TensorFlow would take time there."""
    stop_fork_server()
    with holding(_IS_SUSPENDED, True):
        yield


@contextlib.contextmanager
def expecting_workers() -> Iterator[None]:
    """Start a fork server before the first worker of this block, because many equal ones follow."""
    with holding(_EXPECTS_MORE, True):
        yield


class ForkServers:
    """The fork servers of one owner, as in `name_process`, at most one for each kind of worker."""

    def __init__(self, owner: str, most: int) -> None:
        self._owner = owner
        self._most = most
        self._prefix = f"\0tfdist-fork-server-{owner}-"
        self._lock = threading.Lock()
        self._wanted: list[WorkerKind] = []  # since the last `keep`
        # By name: the last use, the end of the wait for an import, and those started here.
        self._used: dict[str, float] = {}
        self._deadlines: dict[str, float] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def name(self, kind: WorkerKind) -> str:
        return self._prefix + kind.digest()

    def list_names(self) -> list[str]:
        """Return the names of the servers that run, or still start; the last used first."""
        try:
            shown = Path("/proc/net/unix").read_text(errors="replace")
        except OSError:
            return []
        # Listening sockets: a server's connections have its name, too.
        ends = re.findall(
            rf" 00010000 .* @{re.escape(self._prefix[1:])}(\w+)$", shown, re.MULTILINE
        )
        names = [self._prefix + end for end in ends]
        return sorted(names, key=lambda name: self._used.get(name, 0.0), reverse=True)

    def fork(
        self,
        kind: WorkerKind,
        folder: str,
        descriptors: Sequence[int],
        variables: Mapping[str, str],
    ) -> forking.ForkedProcess | None:
        name, pid = self.name(kind), None
        connection = socket.socket(socket.AF_UNIX)
        try:
            self._want(kind)
            connection.settimeout(forking.ANSWER_SECONDS)
            connection.connect(name)
            pid, patience = forking.find_server(connection), forking.ANSWER_SECONDS
            if pid is None:
                limit = self._deadlines.setdefault(name, time.monotonic() + _IMPORT_SECONDS)
                patience = max(0.01, limit - time.monotonic())
            return forking.ForkedProcess(connection, descriptors, variables, [folder], patience)
        except OSError as error:
            LOGGER.debug("the fork server is not used: %s", error)
            connection.close()
            if pid is not None and isinstance(error, TimeoutError):  # it is stopped, for example
                self._end(name)
            return None

    def keep(self, processes: int) -> None:
        """Have a server for each kind of worker that was wanted since the last time.

        ``processes`` is the number of processes on this host that do the same.
        """
        if is_off():
            self.close()
            return
        with self._lock:
            # Something may have changed since the workers were started.
            new = [
                kind
                for kind in self._wanted
                if self._is_new(kind) and describe_worker(kind.variables, kind.python) == kind
            ]
            if new and self._make_room(len(new), processes):
                for kind in new:
                    self._start(kind)
            self._wanted = []

    def close(self) -> None:
        with self._lock:
            self._wanted = []
            for name in self.list_names():
                self._end(name)

    def _want(self, kind: WorkerKind) -> None:
        """Note that a worker starts; start a server first if many such workers follow."""
        with self._lock:
            self._used[self.name(kind)] = time.monotonic()
            if kind not in self._wanted:
                self._wanted = [kind, *self._wanted][: self._most]
            if self._is_new(kind) and self._make_room(1, 1) and _EXPECTS_MORE.get():
                self._start(kind)

    def _is_new(self, kind: WorkerKind) -> bool:
        return self.name(kind) not in self.list_names()

    def _make_room(self, new: int, processes: int) -> bool:
        """End servers that are not wanted; return whether there is room for new ones."""
        running, wanted = self.list_names(), list(map(self.name, self._wanted))
        others = [name for name in running if name not in wanted]
        excess, least = len(running) + new - self._most, new * processes * _BYTES
        while others and (excess > 0 or read_free_memory() < least):
            self._end(others.pop())
            excess -= 1
        return excess <= 0 and read_free_memory() >= least

    def _start(self, kind: WorkerKind) -> None:
        name = self.name(kind)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen()
            process = subprocess.Popen(
                [kind.python, *forking.PROGRAM, forking.SERVE, str(listener.fileno()), self._owner],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env=dict(kind.variables),
                start_new_session=True,
            )
        self._started[name] = process
        self._deadlines[name] = time.monotonic() + _IMPORT_SECONDS
        # It ends by itself when it is idle: this thread reaps it.
        threading.Thread(target=process.wait, daemon=True).start()

    def _end(self, name: str) -> None:
        """Kill a server, and wait for its memory to be free; its workers have guardians."""
        if process := self._started.pop(name, None):  # it may still import TensorFlow
            process.kill()
            # A process that waits for a frozen disk cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END_SECONDS)
        forking.kill_all(partial(_find_pids, name), _END_SECONDS)


def _find_pids(name: str) -> list[int]:
    """Return the PID of the server with a name, unless it has ended or still starts."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.settimeout(_END_SECONDS)
        connection.connect(name)
        if pid := forking.find_server(connection):
            return [pid]
    return []


@cache
def _make_servers(owner: str, most: int) -> ForkServers:
    return ForkServers(owner, most)


def _find_servers(owner: str | None) -> ForkServers:
    # A fork of the session has another name, and so other servers: at its exit, it killed the
    # session's (test_one_that_ends_hangs_or_differs_is_replaced_and_a_fork_does_not_use_it).
    return _make_servers(owner or name_process(os.getpid()), _MOST if owner is None else 1)


atexit.register(stop_fork_server)


def is_off() -> bool:
    return _IS_SUSPENDED.get() or os.environ.get(VARIABLE, "").lower() in _OFF


# Variables that no import reads; those of sshd and of systemd differ in each connection, so that
# no later call forked its workers (test_later_calls_use_it_and_nothing_is_left).
_UNREAD = (
    *("TMPDIR", "TFDIST_RANK", "TFDIST_WORKER", "TFDIST_HOST"),
    *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "KRB5CCNAME"),
    *("INVOCATION_ID", "JOURNAL_STREAM", "XDG_SESSION_ID"),
)
# Ends of paths that change when packages are installed, but not with a user's files.
_OF_PACKAGES = (".zip", "-packages")
# logind's cgroup of a connection, which has no limits of its own.
_LOGIN = re.compile(r"/session-\w+\.scope$", re.MULTILINE)
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


@dataclass(frozen=True)
class WorkerKind:
    """All that a worker gets at its start, which the workers of one fork server have in common."""

    python: str
    variables: Mapping[str, str]
    inherited: Any

    def digest(self) -> str:
        content = self.python, sorted(self.variables.items()), self.inherited
        return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def describe_worker(variables: Mapping[str, str], python: str) -> WorkerKind | None:
    """Return the kind of worker that this process would start; None if it must not be forked."""
    # What TensorFlow does with a GPU after a fork was not tested.
    numbers = [number for number in list_gpus(variables) if not number.startswith("-")]
    has_gpus = numbers or any(device.exists() for device in _DEVICES)
    if sys.platform != "linux" or has_gpus:
        return None
    try:
        status = Path("/proc/thread-self/status").read_text().splitlines()
        inherited = (
            [line for line in status if line.startswith(_INHERITED)],
            Path("/proc/self/oom_score_adj").read_text(),
            _LOGIN.sub("", Path("/proc/self/cgroup").read_text()),
            [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in _LIMITS],
            (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
            (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
            sorted(os.sched_getaffinity(0)),
            os.stat("/proc/self/ns/pid").st_ino,  # containers may share the namespace of names
            _read_times(variables.get("PYTHONPATH", "").split(os.pathsep)),
        )
    except OSError:
        return None
    fixed = {name: value for name, value in variables.items() if name not in _UNREAD}
    for name, value in _SET_BY_IMPORT.items():
        if fixed.get(name) == value or value is None:
            fixed.pop(name, None)
    return WorkerKind(python, fixed, inherited)


def _read_times(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Return when packages in these places were last installed or removed."""
    places = [path for path in paths if path.endswith(_OF_PACKAGES) and os.path.exists(path)]
    return [(path, os.stat(path).st_mtime_ns) for path in places]
