"""A fork server that outlives the process which started it.

Processes that follow each other on a host, such as the tasks of a Spark executor, find it by a name
in Linux's abstract namespace of sockets, where no file is left behind. The name contains the
process with which the server ends. Each end checks that the other one belongs to its user.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence

from pybackend.job.job import LOGGER
from pybackend.launchers.fork_serving import (
    REQUEST,
    SAME,
    is_same_user,
    kill_server,
    start_server,
)
from pybackend.launchers.forking import ForkedProcess
from pybackend.launchers.worker_kind import WorkerKind

# For a server that still imports TensorFlow.
_IMPORT_SECONDS = 20.0


class LastingServer:
    """The fork server of one owner on this host, whether it runs or not.

    Parameters
    ----------
    owner
        The process with which the server ends, as in `name_process`.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._name = name_socket(owner)
        self._wanted: WorkerKind | None = None

    def fork(
        self,
        kind: WorkerKind,
        folder: str,
        descriptors: Sequence[int],
        variables: Mapping[str, str],
    ) -> ForkedProcess | None:
        """Fork a worker; return None if no server runs that starts such workers.

        A server of another kind of worker ends, so that its name becomes free.
        """
        self._wanted = kind
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_IMPORT_SECONDS)
            connection.connect(self._name)
            if not is_same_user(connection):
                raise PermissionError("it belongs to another user")
            connection.sendall(REQUEST + kind.digest())
            if connection.recv(1) != SAME:
                raise ConnectionError("it starts other workers")
            return ForkedProcess(connection, descriptors, variables, [folder])
        except OSError as error:
            LOGGER.debug("the fork server is not used: %s", error)
            if isinstance(error, TimeoutError):  # it is stopped, for example
                kill_server(connection)
            connection.close()
            return None

    def is_running(self) -> bool:
        """Return whether a server has the name."""
        with socket.socket(socket.AF_UNIX) as listener:
            return not _bind(listener, self._name)

    def keep(self) -> None:
        """Have a server for the kind of worker that was wanted last."""
        if self._wanted is None:
            return
        with socket.socket(socket.AF_UNIX) as listener:
            if _bind(listener, self._name):
                listener.listen()
                process = start_server(self._wanted, listener, self._owner)
                # It may end before this process does: this thread reaps it.
                threading.Thread(target=process.wait, daemon=True).start()


def name_socket(owner: str) -> str:
    """Return the name of an owner's server; containers may share the namespace of names."""
    return f"\0tfdist-fork-server-{os.stat('/proc/self/ns/pid').st_ino}-{owner}"


def _bind(listener: socket.socket, name: str) -> bool:
    """Take a name; return False if another socket has it."""
    try:
        listener.bind(name)
    except OSError:
        return False
    return True
