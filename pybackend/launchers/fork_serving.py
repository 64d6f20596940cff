"""The process that has imported TensorFlow, and forks a worker for each request.

It serves one session, through a pair of sockets, or all processes that know its name.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

from pybackend.launchers.forking import attend
from pybackend.launchers.worker_kind import WorkerKind
from pybackend.machine.processes import is_process

IDLE_SECONDS = 600.0
HUNG_SECONDS = 300.0
# Precedes the digest of a kind. Without it, any bytes looked like another kind, and any client of
# this user that sent half a digest ended the server.
REQUEST = b"tfdist worker\n"
# Replies to the digest of a kind.
SAME, OTHER = b"y", b"n"
PROGRAM = ("-u", "-c")
# Not `python -m`: with it, a `queue.py` in the user's directory ended every worker
# (test_files_of_the_current_directory_do_not_stand_in_for_modules).
RUN_WORKER = (
    "import runpy; runpy.run_module('pybackend.worker', run_name='__main__', alter_sys=True)"
)
_LOOK_SECONDS = 5.0
_REQUEST_SECONDS = 5.0
# PID, user and group of the other end.
_PEER = struct.Struct("3i")
_IMPORT = "from pybackend.launchers.fork_serving import serve"
# The server's objects are frozen: collecting garbage in a worker would copy their memory.
_SERVE = (
    f"import sys, gc, signal; del sys.path[0]; signal.alarm({HUNG_SECONDS:.0f}); gc.disable(); "
    "import keras, pybackend.data.reading, pybackend.engine.score, pybackend.engine.train; "
    "gc.freeze(); gc.enable(); "
    f"{_IMPORT}; signal.alarm(0); serve(int(sys.argv[1]), *sys.argv[2:]); {RUN_WORKER}"
)


def start_server(kind: WorkerKind, control: socket.socket, owner: str) -> subprocess.Popen[bytes]:
    """Start a server that is controlled through a connected or a listening socket.

    ``owner`` is the process, as in `name_process`, with which it ends.
    """
    return subprocess.Popen(
        [kind.python, *PROGRAM, _SERVE, str(control.fileno()), owner, kind.digest().hex()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
        env=dict(kind.variables),
        start_new_session=True,
    )


def serve(number: int, owner: str, digest: str) -> None:
    """Fork a worker for each request; return in the worker alone.

    The server exits with its owner, when it has been idle for `IDLE_SECONDS`, or when a process
    that knows its name wants workers of another kind.

    Parameters
    ----------
    number
        File descriptor of the control connection to the session, or of a listening socket.
    owner
        The process with which it ends. Processes that were forked from it may keep the connection
        open.
    digest
        Digest of its workers' kind, in hexadecimal.
    """
    control = socket.socket(fileno=number)
    is_named = control.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    os.chdir("/")  # the session's directory can be removed; a worker gets its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the guardians
    if is_named:
        # From now on, the system names this process as the other end. Otherwise a stopped server
        # could not be found and killed, and each call waited for it
        # (test_other_workers_elastic_ones_and_killed_servers).
        control.listen()
    else:
        with contextlib.suppress(OSError):  # the session has ended
            control.sendall(b"r")
    requests = select.poll()
    requests.register(control, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # before Linux 5.3
        requests.register(os.pidfd_open(int(owner.partition("-")[0])), select.POLLIN)
    last = time.monotonic()
    while is_process(owner) and time.monotonic() < last + IDLE_SECONDS:
        if number not in dict(requests.poll(_LOOK_SECONDS * 1000)):
            continue
        try:
            connection = _accept(control, digest) if is_named else _receive(control)
        except OSError:  # the other end has given up
            continue
        if connection is None:
            break
        last = time.monotonic()
        with contextlib.closing(connection):
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                attend(connection, lambda message: os.setsid())
                return
    os._exit(0)


def _receive(control: socket.socket) -> socket.socket | None:
    """Return the session's connection for one worker; None if the session has ended."""
    first, received, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=received[0]) if first else None


def _accept(control: socket.socket, digest: str) -> socket.socket | None:
    """Return a connection for one worker of this kind; None if another kind is wanted."""
    connection, _ = control.accept()
    try:
        if not is_same_user(connection):
            raise PermissionError("a process of another user")
        connection.settimeout(_REQUEST_SECONDS)
        size = len(REQUEST) + len(digest) // 2
        wanted = connection.recv(size, socket.MSG_WAITALL)
        if len(wanted) < size or not wanted.startswith(REQUEST):
            raise ConnectionError("not a request")
        if wanted.removeprefix(REQUEST).hex() != digest:
            connection.sendall(OTHER)
            return None
        connection.sendall(SAME)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to this user, in this container."""
    pid, user = _read_peer(connection)
    return pid > 0 and user == os.geteuid()  # 0: of another container


def kill_server(connection: socket.socket) -> None:
    """Kill the server at the other end of a connection, because it does not answer."""
    with contextlib.suppress(OSError):  # the connection may be closed
        pid, _ = _read_peer(connection)
        # Until it serves, this is the process that started it.
        if _IMPORT.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _read_peer(connection: socket.socket) -> tuple[int, int]:
    """Return the PID and the user of the other end of a Unix socket."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(peer)
    return pid, user
