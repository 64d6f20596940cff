"""A worker's process forked from a server that has imported TensorFlow: both ends of the protocol.

The launcher connects to the server and sends descriptors and a line of JSON. The server forks a
guardian, which forks the worker, sends its PID, and, once the worker and all its descendants have
ended, its exit status.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pybackend.launchers.processes import adopt_orphans, end_descendants

# A server that has not answered after this time is stopped, or hangs.
_ANSWER_SECONDS = 20.0
_CLEAN_UP_SECONDS = 2.0
_MOST_DESCRIPTORS = 16
# An answer: which number it is, and the number.
_ANSWER = struct.Struct("<ci")
_PID, _STATUS = b"p", b"s"
_GO = b"g"
# A signal that is sent to all processes is meant for the worker. The guardian ignores it, because
# it must still report the worker's exit status: when it died of it, the worker counted as killed.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ForkedProcess:
    """The part of `subprocess.Popen` that launchers use, for a forked process.

    Parameters
    ----------
    connection
        Connection to the server, which this object closes.
    descriptors
        File descriptors that the process inherits. Their numbers in the process are its last
        command-line arguments.
    variables
        The process's environment.
    arguments
        The process's first command-line arguments.

    Raises
    ------
    OSError
        The server has ended, or does not answer. Then the process does not run.
    """

    def __init__(
        self,
        connection: socket.socket,
        descriptors: Sequence[int],
        variables: Mapping[str, str],
        arguments: Sequence[str] = (),
    ) -> None:
        message = {"arguments": list(arguments), "environment": dict(variables)}
        self.returncode: int | None = None
        self._connection = connection
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
            failed.callback(connection.close)
            # A descriptor also works if the directory can no longer be opened by its name.
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            its_stdin, to_stdin = os.pipe()
            stack.callback(os.close, its_stdin)
            self.stdin = failed.enter_context(os.fdopen(to_stdin, "wb"))
            from_stdout, its_stdout = os.pipe()
            stack.callback(os.close, its_stdout)
            self.stdout = failed.enter_context(os.fdopen(from_stdout, "rb"))
            connection.settimeout(_ANSWER_SECONDS)
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
        """Return the exit status, or None while the process runs."""
        with self._lock:
            if self.returncode is None and self._has_answer(0):
                status = self._receive(_STATUS)
                # Without the guardian, the exit status is unknown. The launcher then kills the
                # worker.
                self.returncode = -signal.SIGKILL if status is None else status
                self._connection.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, at most ``timeout`` seconds; return the exit status."""
        if self.poll() is None:
            with contextlib.suppress(ValueError):  # another thread has read the status
                self._has_answer(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
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


def attend(
    connection: socket.socket, enter: Callable[[Mapping[str, Any]], object]
) -> Mapping[str, Any]:
    """Fork a worker as the connection asks; return in the worker alone, with the message.

    The calling process is the worker's guardian: it exits after the worker. When the launcher ends
    first, it resumes a stopped worker, which then notices that.

    Parameters
    ----------
    connection
        Connection to a `ForkedProcess`.
    enter
        Called in the worker with the message before anything else.
    """
    _, received, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
    with connection.makefile("rb") as stream:
        message: Mapping[str, Any] = json.loads(stream.readline())
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
    """Resume a stopped worker when its launcher has closed the connection."""
    # It would stay stopped forever, with its folder, as only a running process reads its lifeline.
    ends = select.poll()
    ends.register(connection, select.POLLRDHUP)
    ends.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)


def _take(message: Mapping[str, Any], received: Sequence[int]) -> None:
    """Take the launcher's descriptors, folder, environment and arguments."""
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
    tempfile.tempdir = None  # an import may have read the server's TMPDIR
    importlib.invalidate_caches()  # folders on the path may be new
    sys.argv[:] = [sys.argv[0], *message["arguments"], *map(str, received[4:])]
    # Otherwise all workers would draw the same numbers.
    random.seed()
    np.random.seed()


def _read_first_environment() -> set[str]:
    """Return the names of the variables with which this process, or the server, was started."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {os.fsdecode(entry.partition(b"=")[0]) for entry in entries if entry}
