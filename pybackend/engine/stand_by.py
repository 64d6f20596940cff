"""Spare worker: a process that has imported TensorFlow and waits for a job."""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import tempfile

from pybackend.model.quiet import uncollected

_IDLE_SECONDS = 600.0


def stand_by(number: int) -> None:
    """Import TensorFlow, and wait for a worker's job; exit if none arrives.

    Parameters
    ----------
    number
        File descriptor of the connection to the session.
    """
    connection = socket.socket(fileno=number)
    with uncollected():
        import keras  # noqa: F401

        import pybackend.engine.score
        import pybackend.engine.train  # noqa: F401
    gc.freeze()
    if not select.select([connection], [], [], _IDLE_SECONDS)[0]:
        connection.shutdown(socket.SHUT_RD)  # the session then starts a new process
    first, received, _, _ = socket.recv_fds(connection, 1, 2)
    if not first:
        os._exit(0)
    with connection, connection.makefile("rb") as stream:
        message = json.loads(stream.read())
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["directory"])
    tempfile.tempdir = None  # an import may have read the old TMPDIR
    sys.argv[:] = [sys.argv[0], message["folder"], *map(str, received)]
