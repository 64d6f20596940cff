"""Both ends of a fork server: a process that has imported TensorFlow, and forks workers.

A launcher connects to the server, which forks a guardian. The launcher sends this one descriptors
and a line of JSON. The guardian forks the worker, sends its PID, and, once the worker and all its
descendants have ended, its exit status. Each end checks that the other one belongs to its user.

The functions at the end kill what a worker, forked or not, has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pybackend.core.machine import processes

IDLE_SECONDS = 600.0
_HUNG_SECONDS = 300.0
# An end that has not answered after this time is stopped, or hangs.
ANSWER_SECONDS = 20.0
_LOOK_SECONDS = 5.0
_CLEAN_UP_SECONDS = 2.0
_MOST_DESCRIPTORS = 16
PROGRAM = ("-u", "-c")
# Not `python -m`: with it, a `queue.py` in the user's directory ended every worker
# (test_files_of_the_current_directory_do_not_stand_in_for_modules).
RUN_WORKER = (
    "import runpy; runpy.run_module('pybackend.core.worker', run_name='__main__', alter_sys=True)"
)
_IMPORT = "from pybackend.core.launchers.forking import serve"
# The program of a server. Its objects are frozen: collecting garbage in a worker would copy their
# memory.
SERVE = (
    f"import sys, gc, signal; del sys.path[0]; signal.alarm({_HUNG_SECONDS:.0f}); gc.disable(); "
    "import keras, pybackend.core.data.reading, pybackend.core.engine.evaluation; "
    "import pybackend.core.engine.train; "
    "gc.freeze(); gc.enable(); "
    f"{_IMPORT}; signal.alarm(0); serve(int(sys.argv[1]), sys.argv[2]); {RUN_WORKER}"
)
# PID, user and group of the other end of a socket.
_PEER = struct.Struct("3i")
READY = b"r"
# Variables with the number of threads of a worker. TensorFlow reads them in its first step, but
# numpy's OpenBLAS when it is imported.
THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
_SET_THREADS = (
    *("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_"),
    *("scipy_openblas_set_num_threads", "openblas_set_num_threads"),
)
# An answer: which number it is, and the number.
_ANSWER = struct.Struct("<ci")
_PID, _STATUS = b"p", b"s"
_GO = b"g"
# A signal that is sent to all processes is meant for the worker. The guardian ignores it, because
# it must still report the worker's exit status: when it died of it, the worker counted as killed.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ForkedProcess:
    """The part of `subprocess.Popen` that launchers use, for a forked process.

    It takes over ``connection``, to the server. The process inherits ``descriptors``, whose numbers
    there are its last command-line arguments, after ``arguments``. ``patience`` is the time in
    seconds to wait for a server that still imports TensorFlow. `OSError` if the server has ended,
    or does not answer: then the process does not run.
    """

    def __init__(
        self,
        connection: socket.socket,
        descriptors: Sequence[int],
        variables: Mapping[str, str],
        arguments: Sequence[str] = (),
        patience: float = ANSWER_SECONDS,
    ) -> None:
        message = {"arguments": list(arguments), "environment": dict(variables)}
        self.returncode: int | None = None
        self._connection = connection
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
            failed.callback(connection.close)
            connection.settimeout(patience)
            if connection.recv(1) != READY:
                raise ConnectionError("the fork server has ended")
            connection.settimeout(ANSWER_SECONDS)
            # A descriptor also works if the directory can no longer be opened by its name.
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            its_stdin, to_stdin = os.pipe()
            stack.callback(os.close, its_stdin)
            self.stdin = failed.enter_context(os.fdopen(to_stdin, "wb"))
            from_stdout, its_stdout = os.pipe()
            stack.callback(os.close, its_stdout)
            self.stdout = failed.enter_context(os.fdopen(from_stdout, "rb"))
            sent = [its_stdin, its_stdout, its_stdout, folder, *descriptors]
            socket.send_fds(connection, [b"."], sent)
            connection.sendall(json.dumps(message).encode() + b"\n")
            pid = self._receive(_PID)
            if pid is None:
                raise ConnectionError("the fork server has started no process")
            connection.sendall(_GO)
            failed.pop_all()
        self.pid = pid

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._has_answer(0):
                status = self._receive(_STATUS)
                # Without the guardian, the exit status is unknown. The launcher then kills the
                # worker.
                self.returncode = -signal.SIGKILL if status is None else status
                self._connection.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            with contextlib.suppress(ValueError):  # another thread has read the status
                self._has_answer(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def _has_answer(self, timeout: float | None) -> bool:
        answers = select.poll()  # unlike `select`, for any descriptor
        answers.register(self._connection, select.POLLIN)
        return bool(answers.poll(None if timeout is None else timeout * 1000))

    def _receive(self, wanted: bytes) -> int | None:
        received = self._connection.recv(_ANSWER.size, socket.MSG_WAITALL)
        if len(received) < _ANSWER.size:
            return None
        kind, number = _ANSWER.unpack(received)
        return int(number) if kind == wanted else None


def serve(number: int, owner: str) -> None:
    """Fork a worker for each connection to the socket ``number``; return in the worker alone.

    The server exits with its owner, as in `name_process`, or when it was idle for `IDLE_SECONDS`.
    """
    listener = socket.socket(fileno=number)
    os.chdir("/")  # the session's directory can be removed; a worker gets its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the guardians
    # From now on, the system names this process as the other end. Otherwise a stopped server could
    # not be found and killed, and each call waited for it
    # (test_other_workers_elastic_ones_and_killed_servers).
    listener.listen()
    requests = select.poll()
    requests.register(listener, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # before Linux 5.3
        requests.register(os.pidfd_open(int(owner.partition("-")[0])), select.POLLIN)
    last = time.monotonic()
    while processes.is_process(owner) and time.monotonic() < last + IDLE_SECONDS:
        if number not in dict(requests.poll(_LOOK_SECONDS * 1000)):
            continue
        with listener.accept()[0] as connection:
            if not is_same_user(connection):
                continue
            last = time.monotonic()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                attend(connection, lambda message: os.setsid())
                return
    os._exit(0)


def find_server(connection: socket.socket) -> int | None:
    """Return the PID of the server at the other end; None while it imports TensorFlow.

    `PermissionError` if it belongs to another user.
    """
    if not is_same_user(connection):
        raise PermissionError("it belongs to another user")
    pid, _ = _read_peer(connection)
    # Until it serves, this is the process that started it.
    with contextlib.suppress(OSError):
        if _IMPORT.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to this user, in this container."""
    pid, user = _read_peer(connection)
    return pid > 0 and user == os.geteuid()  # 0: of another container


def _read_peer(connection: socket.socket) -> tuple[int, int]:
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(peer)
    return pid, user


def attend(
    connection: socket.socket, enter: Callable[[Mapping[str, Any]], object]
) -> Mapping[str, Any]:
    """Fork a worker as a `ForkedProcess` asks; return in the worker alone, with the message.

    The calling process is the worker's guardian: it exits after the worker. When the launcher ends
    first, it resumes a stopped worker, which then notices that. The worker calls ``enter`` with the
    message before anything else.
    """
    connection.settimeout(ANSWER_SECONDS)
    connection.sendall(READY)
    _, received, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
    with connection.makefile("rb") as stream:
        message: Mapping[str, Any] = json.loads(stream.readline())
    connection.settimeout(None)
    adopt_orphans()
    worker = os.fork()
    if worker == 0:
        enter(message)
        _take(message, received)
        # A launcher that has given up has started another process: both would run
        # (test_one_that_ends_hangs_or_differs_is_replaced_and_a_fork_does_not_use_it).
        if connection.recv(1) != _GO:
            os._exit(1)
        connection.close()
        return message
    # Not the worker: when one was stopped before it did, the launcher waited here, started another
    # process instead, and its peers reported that it did not answer.
    with contextlib.suppress(OSError):  # the launcher has given up
        connection.sendall(_ANSWER.pack(_PID, worker))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for descriptor in received:
        os.close(descriptor)
    threading.Thread(target=_resume_when_left, args=(connection, worker), daemon=True).start()
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != worker:
        os.waitpid(ended.si_pid, 0)  # an orphan
    # No other process can get the worker's PID until it is reaped.
    end_descendants(_CLEAN_UP_SECONDS, spared=[worker])
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(_ANSWER.pack(_STATUS, status))
    os._exit(0)


def _resume_when_left(connection: socket.socket, worker: int) -> None:
    # It would stay stopped forever, with its folder, as only a running process reads its lifeline.
    ends = select.poll()
    ends.register(connection, select.POLLRDHUP)
    ends.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)


def _take(message: Mapping[str, Any], received: Sequence[int]) -> None:
    import numpy as np

    for number, descriptor in enumerate(received[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.fchdir(received[3])
    os.close(received[3])
    # What imports have set remains, as in a process that imports the same: forked workers lacked
    # HDF5_PLUGIN_PATH=disable
    # (test_signals_to_a_whole_group_leave_the_guardian_and_imports_leave_their_variables).
    for name in _read_first_environment() - set(message["environment"]):
        os.environ.pop(name, None)
    os.environ.update(message["environment"])
    _limit_threads()
    tempfile.tempdir = None  # an import may have read the server's TMPDIR
    importlib.invalidate_caches()  # folders on the path may be new
    sys.argv[:] = [sys.argv[0], *message["arguments"], *map(str, received[4:])]
    # Otherwise all workers would draw the same numbers.
    random.seed()
    np.random.seed()


def _limit_threads() -> None:
    """Let numpy use as many threads as if it had been imported with this process's variables."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads.isdigit() or "OPENBLAS_NUM_THREADS" in os.environ:  # which the server had
        return
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    for path in {line.split(maxsplit=5)[5] for line in maps if "openblas" in line}:
        # Not all are libraries: the name may be that of a folder.
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for name in _SET_THREADS:
                if hasattr(library, name):
                    getattr(library, name)(int(threads))


def _read_first_environment() -> set[str]:
    """Return the names of the variables with which this process, or the server, was started."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {os.fsdecode(entry.partition(b"=")[0]) for entry in entries if entry}


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_EVERY_SECONDS = 0.01


def adopt_orphans() -> None:
    """Become the parent of any descendant whose own parent ends, so that no daemon escapes.

    Linux only; elsewhere only process groups are killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def name_signal(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def when_orphaned(number: signal.Signals) -> Callable[[], None]:
    """Return a function that makes the system signal this process when its parent ends."""
    # Loaded here, because that must not happen after a fork.
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def ask() -> None:
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, number)

    return ask


def end_descendants(seconds: float, spared: Collection[int] = ()) -> None:
    """Kill all descendants of a process that has adopted orphans, and wait for them to end.

    The wait for a process that hangs in the kernel ends after ``seconds``, and ``spared`` children
    are not killed.
    """
    # A killed child's own children become children of this process, so each round goes one
    # generation deeper.
    kill_all(lambda: set(processes.list_children()) - set(spared), seconds, reap)


def kill_all(
    find: Callable[[], Collection[int]],
    seconds: float,
    after: Callable[[Collection[int]], object] = lambda pids: None,
) -> None:
    """Find and kill processes repeatedly until none are found or time runs out.

    ``after`` is called with the processes that were just killed.
    """
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        after(found)
        time.sleep(_KILL_EVERY_SECONDS)


def reap(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


_MARKED_SECONDS = 2.0


def end_marked(variable: str, value: str) -> None:
    """Kill all of this user's processes that inherited an environment variable with this value.

    Linux only: elsewhere only process groups are killed. This does not wait for a process that
    hangs in the kernel.
    """
    # A child may have left its parent's process group (`setsid`), and its parent may have exited.
    kill_all(partial(_find_marked, f"{variable}={value}".encode()), _MARKED_SECONDS)


def _find_marked(mark: bytes) -> list[int]:
    found = []
    for pid in processes.list_processes():
        with contextlib.suppress(OSError):  # of other users, or just exited
            if mark in processes.read_variables(pid):
                found.append(pid)
    # One that has ended may wait for its parent.
    states = {pid: processes.read_main_thread(pid) for pid in found}
    return [pid for pid, state in states.items() if state is not None and state[0] != "Z"]
