"""Live events from workers in a cluster to the driver: lines of JSON over proven connections."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from typing import Any

from pybackend.rendezvous import Doorkeeper, address_of, greet_as_client, listen

_PURPOSE = "events"
_LONGEST_LINE = 1 << 20


class EventServer:
    """Collects events into ``queue``; a context manager. Listens on one address of the driver."""

    def __init__(self, host: str, token: str) -> None:
        self.queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._connections: list[socket.socket] = []
        server = listen(host)
        self.address = address_of(server)
        self._door = Doorkeeper(server, token, _PURPOSE, self._welcome)

    def __enter__(self) -> EventServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()
        for connection in self._connections:
            # Closing alone does not wake the thread that reads from it.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _welcome(self, connection: socket.socket, rank: int) -> None:
        self._connections.append(connection)
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                while line := lines.readline(_LONGEST_LINE):
                    self.queue.put(json.loads(line))
        except (OSError, ValueError):  # the worker is gone, or the server closes
            pass


class EventClient:
    """Sends events to the driver where it can be reached, and drops them where it cannot."""

    def __init__(self, address: str | None, token: str, rank: int) -> None:
        self._lock = threading.Lock()
        self._connection = self._connect(address, token, rank) if address else None

    def __call__(self, event: dict[str, Any]) -> bool:
        """Send one event; returns whether it went out.

        A driver that no longer listens is no reason to stop training.
        """
        with self._lock:
            if self._connection is None:
                return False
            try:
                self._connection.sendall(json.dumps(event).encode() + b"\n")
            except OSError:
                self._connection.close()
                self._connection = None
            return self._connection is not None

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    @staticmethod
    def _connect(address: str, token: str, rank: int) -> socket.socket | None:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError:
            return None
        try:
            greet_as_client(connection, token, rank, _PURPOSE)
        except OSError:
            connection.close()
            return None
        return connection
