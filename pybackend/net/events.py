"""Live events from workers in a cluster to the driver: lines of JSON over proven connections."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import deque
from typing import Any

from pybackend.net.rendezvous import Acceptor, address_of, connect, listen
from pybackend.net.stream import Stream

_PURPOSE = "events"
_LONGEST_LINE = 1 << 20
_CONNECT_SECONDS = 3.0
_SEND_SECONDS = 10.0
# Events that wait for the connection; the oldest give way.
_MOST_WAITING = 10_000


class EventServer:
    """Collects events into ``queue``; a context manager. Listens on one address of the driver."""

    def __init__(self, host: str, token: str, announced: str | None = None) -> None:
        self.queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._connections: list[Stream] = []
        server = listen(host)
        self.address = address_of(server, announced)
        self._acceptor = Acceptor(server, token, _PURPOSE, self._welcome)

    def __enter__(self) -> EventServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()
        for connection in self._connections:
            connection.close()

    def _welcome(self, connection: Stream, rank: int) -> None:
        self._connections.append(connection)
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Stream) -> None:
        try:
            while line := connection.read_line(_LONGEST_LINE):
                self.queue.put(json.loads(line))
        except (OSError, ValueError):  # the worker is gone, or the server closes
            pass


class EventClient:
    """Sends events to the driver where it can be reached, and drops them where it cannot.

    It connects in the background, so that a driver behind a firewall delays no worker. Events
    wait for the connection.
    """

    def __init__(self, address: str | None, token: str, rank: int) -> None:
        self._lock = threading.Lock()
        self._connection: Stream | None = None
        self._waiting: deque[bytes] | None = None
        self._settled = threading.Event()
        self._latest = time.monotonic() + _CONNECT_SECONDS
        if address is not None:
            self._waiting = deque(maxlen=_MOST_WAITING)
            greeting = (address, token, rank)
            threading.Thread(target=self._open, args=greeting, daemon=True).start()

    def __call__(self, event: dict[str, Any]) -> bool:
        """Send one event; returns whether it is known to have gone out.

        A driver that no longer listens is no reason to stop training.
        """
        line = json.dumps(event).encode() + b"\n"
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(line)
                return False
            return self._send(line)

    def close(self) -> None:
        """Close the connection, once what waits for it is sent."""
        with self._lock:
            is_connecting = self._waiting is not None
        if is_connecting:
            self._settled.wait(max(0.0, self._latest - time.monotonic()))
        with self._lock:
            self._waiting = None
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _open(self, address: str, token: str, rank: int) -> None:
        connection = None
        with contextlib.suppress(OSError):
            connection = connect(address, token, rank, _PURPOSE, _CONNECT_SECONDS)
        with self._lock:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._connection = connection
                for line in waiting:
                    self._send(line)
            elif connection is not None:  # it was closed in the meantime
                connection.close()
        self._settled.set()

    def _send(self, line: bytes) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send_all(line, _SEND_SECONDS)
        except OSError:
            self._connection.close()
            self._connection = None
        return self._connection is not None
