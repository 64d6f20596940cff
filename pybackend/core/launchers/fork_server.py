"""Fork servers: processes that have imported TensorFlow, from which workers are forked.

The import takes seconds, which is most of the time of a short training run. So one process imports
TensorFlow, and the workers of all calls with a model are forked from it, within milliseconds, if
they would start in the same way: with the same environment, limits and user. The server runs no
job, so a worker begins as a new process does: it has the same imports, but random numbers of its
own.

A server belongs to a process, its owner: this session, a Spark executor, or the keeper of a session
on a host. It ends with its owner, or after ten idle minutes. The owner's processes, such as the
tasks of an executor, find it by a name in Linux's abstract namespace of sockets, where no file is
left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
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
from typing import TYPE_CHECKING, Any

import pybackend.core.launchers.forking as forking
from pybackend.core.job.job import LOGGER
from pybackend.core.launchers.base import holding
from pybackend.core.launchers.package_files import own_libraries, package_root
from pybackend.core.machine.capacity import keep_usable, list_gpus, read_free_memory
from pybackend.core.machine.processes import name_process

if TYPE_CHECKING:
    from pybackend.core.launchers.environment.installing import Interpreter

VARIABLE = "TFDIST_FORK_SERVER"
# Memory that must be free; TensorFlow takes half of it.
_BYTES = 1e9
# From this time after its start on, no call waits for a server that still imports TensorFlow.
_IMPORT_SECONDS = 60.0
_END_SECONDS = 2.0
_LISTENING_SECONDS = 0.05
_START = f"import sys; del sys.path[0]; {forking.RUN_WORKER}"
_IS_SUSPENDED: ContextVar[bool] = ContextVar("_IS_SUSPENDED", default=False)
_OFF = ("0", "false", "no", "off")


# The servers for workers of this block, and how many processes on this machine have such servers.
_FORKING: ContextVar[tuple[ForkServers, int] | None] = ContextVar("_FORKING", default=None)
_WAITS: ContextVar[bool] = ContextVar("_WAITS", default=True)


def start_worker(
    folder: str,
    descriptors: Sequence[int],
    variables: Mapping[str, str],
    may_fork: bool,
    python: str = sys.executable,
) -> subprocess.Popen[bytes] | forking.ForkedProcess:
    """Start a worker's process: fork it if there can be a fork server for it, else run ``python``.

    It inherits ``descriptors``, its listening socket and its pipe for events. ``may_fork`` is
    whether TensorFlow may already be imported when it starts.
    """
    found = _FORKING.get()
    if may_fork and found and not is_off() and (kind := describe_worker(variables, python)):
        servers, processes = found
        given = (kind, folder, descriptors, variables, processes)
        if forked := servers.fork(*given, waits=_WAITS.get()):
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
def forking_workers(processes: int = 1, owner: str | None = None) -> Iterator[None]:
    """Fork the workers of this block from a fork server, if memory allows.

    ``processes`` is the number of processes on this machine that do the same. The server ends with
    ``owner``, as in `name_process`, and other processes with this owner use it, too; None: this
    process alone.
    """
    try:
        servers = _find_servers(owner)
    except OSError as error:  # this is not Linux
        LOGGER.debug("no fork server: %s", error)
        yield
        return
    if is_off():
        servers.close()
    with holding(_FORKING, (servers, processes)):
        yield


def forking_at_once() -> contextlib.AbstractContextManager[None]:
    """Fork the workers of this block only if a server is ready; none is started or waited for."""
    return holding(_WAITS, False)


def is_forking() -> bool:
    """Return whether a server runs, or still imports TensorFlow, for workers of this block."""
    found = _FORKING.get()
    return found is not None and not is_off() and bool(found[0].list_names())


def start_fork_server() -> None:
    """Start this session's server, without waiting for it, so that its first call is sooner."""
    try:
        kind = describe_worker(worker_variables(), sys.executable)
        if kind is not None and not is_off():
            _find_servers(None).start(kind, 1)
    except Exception as error:  # the call works without it
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


class ForkServers:
    """The fork servers of one owner, as in `name_process`: one, for the last kind of worker."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._prefix = f"\0tfdist-fork-server-{owner}-"
        self._lock = threading.Lock()
        # By name: the end of the wait for an import, and those started here, also the failed ones.
        self._deadlines: dict[str, float] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def name(self, kind: WorkerKind) -> str:
        return self._prefix + kind.digest()

    def list_names(self) -> list[str]:
        """Return the names of the servers that run, or still start."""
        try:
            shown = Path("/proc/net/unix").read_text(errors="replace")
        except OSError:
            return []
        # Listening sockets: a server's connections have its name, too.
        ends = re.findall(
            rf" 00010000 .* @{re.escape(self._prefix[1:])}(\w+)$", shown, re.MULTILINE
        )
        return [self._prefix + end for end in ends]

    def start(self, kind: WorkerKind, processes: int) -> None:
        """Start a server, unless there is one, or too little memory for it.

        It takes the place of a server for other workers. ``processes`` is the number of processes
        on this host that do the same.
        """
        with self._lock:
            running, name = self.list_names(), self.name(kind)
            if name in running or self._has_failed(name):
                return
            for other in running:
                self._end(other)
            if read_free_memory() >= processes * _BYTES:
                self._start(kind)

    def fork(
        self,
        kind: WorkerKind,
        folder: str,
        descriptors: Sequence[int],
        variables: Mapping[str, str],
        processes: int = 1,
        waits: bool = True,
    ) -> forking.ForkedProcess | None:
        """Fork a worker from the server for its kind, which is started first if there is none.

        With ``waits=False``, none is started or waited for.
        """
        name, pid = self.name(kind), None
        connection = socket.socket(socket.AF_UNIX)
        try:
            if waits:
                self.start(kind, processes)
            started = self._started.get(name)
            connection.settimeout(forking.ANSWER_SECONDS)
            connection.connect(name)
            pid, patience = forking.find_server(connection), forking.ANSWER_SECONDS
            if pid is None:
                limit = self._deadlines.setdefault(name, time.monotonic() + _IMPORT_SECONDS)
                patience = max(0.01, limit - time.monotonic() if waits else 0.0)
            else:  # the next one gets its own time
                self._deadlines.pop(name, None)
            return forking.ForkedProcess(connection, descriptors, variables, [folder], patience)
        except (OSError, RuntimeError) as error:  # RuntimeError: too many threads
            LOGGER.debug("the fork server is not used: %s", error)
            connection.close()
            if pid is not None and isinstance(error, TimeoutError):  # it is stopped, for example
                with contextlib.suppress(OSError, RuntimeError):
                    self._replace(started, kind, processes)
            return None

    def close(self) -> None:
        with self._lock:
            for name in self.list_names():
                self._end(name)

    def _replace(
        self, started: subprocess.Popen[bytes] | None, kind: WorkerKind, processes: int
    ) -> None:
        name = self.name(kind)
        with self._lock:
            if self._started.get(name) is started:  # else another thread has replaced it
                self._end(name)
        self.start(kind, processes)

    def _has_failed(self, name: str) -> bool:
        """Return whether the last such server failed, as its workers would: they show the error."""
        try:
            return self._started[name].wait(_END_SECONDS) > 0
        except (KeyError, subprocess.TimeoutExpired):
            return False

    def _start(self, kind: WorkerKind) -> None:
        name = self.name(kind)
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # Another task of the executor starts it, and listens in a moment
                # (test_the_workers_of_all_calls_are_forked_and_the_server_ends_with_its_executor).
                time.sleep(_LISTENING_SECONDS)
                return
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
def _make_servers(owner: str) -> ForkServers:
    return ForkServers(owner)


def _find_servers(owner: str | None) -> ForkServers:
    # A fork of the session has another name, and so other servers: at its exit, it killed the
    # session's (test_one_that_ends_hangs_or_differs_is_replaced_and_a_fork_does_not_use_it).
    return _make_servers(owner or name_process(os.getpid()))


atexit.register(stop_fork_server)


def is_off() -> bool:
    return _IS_SUSPENDED.get() or os.environ.get(VARIABLE, "").lower() in _OFF


# Workers imported from the zip of a session that had ended
# (test_a_zip_of_a_spark_session_that_has_ended_is_not_used).
_OWN_ZIP = re.compile(r"pybackend-[0-9a-f]{16}\.zip")


def worker_variables(interpreter: Interpreter | None = None) -> dict[str, str]:
    """Return the environment of workers here, except what differs between them.

    ``interpreter`` is their Python; None: that of this process.
    """
    if interpreter is not None:
        given = interpreter.variables(os.environ)
    else:
        # They can import what this process can, including a zip sent by Spark; but not a zip of
        # this package from a session that has ended, which may be deleted at any time.
        own, found = package_root(), [os.path.abspath(path or ".") for path in sys.path]
        paths = [p for p in found if p == own or not _OWN_ZIP.fullmatch(os.path.basename(p))]
        given = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            **own_libraries(),
            # If R embeds Python, or Python R: the same Python.
            "RETICULATE_PYTHON": sys.executable,
        }
    # R needs a UTF-8 locale.
    chosen = next((v for v in map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG")) if v), "C")
    is_utf8 = "UTF-8" in chosen.upper().replace("UTF8", "UTF-8")
    return {
        **given,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        **({} if is_utf8 else {"LC_ALL": "C.UTF-8"}),
    }


# Variables that no import reads, or whose effect is set after the fork. Those of sshd and systemd
# differ in each connection, so that no later call forked its workers
# (test_later_calls_use_it_and_nothing_is_left).
_UNREAD = (
    *("TMPDIR", "TFDIST_RANK", "TFDIST_WORKER", "TFDIST_HOST", *forking.THREADS),
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
    has_gpus = keep_usable(list_gpus(variables)) or any(device.exists() for device in _DEVICES)
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
    # These workers have no GPU, however that was said: a call with `gpus=0` replaced the server.
    fixed["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in _SET_BY_IMPORT.items():
        if fixed.get(name) == value or value is None:
            fixed.pop(name, None)
    return WorkerKind(python, fixed, inherited)


def _read_times(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Return when packages in these places were last installed or removed."""
    places = [path for path in paths if path.endswith(_OF_PACKAGES) and os.path.exists(path)]
    return [(path, os.stat(path).st_mtime_ns) for path in places]
