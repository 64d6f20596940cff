"""Where workers meet that have no barrier of their own: at the driver, over proven connections.

Each worker holds one connection. On it travel, as lines of JSON, its messages to all others, its
events, and its results in parts; back come the lists of everyone's messages. The open connection
is also the worker's lifeline: when it closes, the driver is gone or has given up.
"""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pybackend.errors import ClusterError
from pybackend.net.rendezvous import Acceptor, address_of, connect, listen
from pybackend.net.stream import Stream

_PURPOSE = "meeting"
_LONGEST_LINE = 1 << 20
# The messages of all workers.
_LONGEST_ANSWER = 1 << 30
# base64 makes four bytes of three, and some are left for the rest of the line.
_PART = 3 << 17
_CONNECT_SECONDS = 10.0


class MeetingServer:
    """The driver's side; a context manager.

    Parameters
    ----------
    host
        Address of the driver to listen on.
    token, workers
        Of the job.
    announced
        Address by which workers reach the driver, where that is another one.

    Attributes
    ----------
    address
        ``host:port`` for the workers.
    queue
        Events of the workers, in the order of their coming.
    """

    def __init__(self, host: str, token: str, workers: int, announced: str | None = None) -> None:
        self.queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._workers = workers
        self._lock = threading.Lock()
        self._connections: dict[int, Stream] = {}
        # Each worker's messages, one per gathering.
        self._messages: dict[int, list[Any]] = {rank: [] for rank in range(workers)}
        self._parts: dict[tuple[int, str], bytearray] = {}
        self._readers: list[threading.Thread] = []
        self._first = float("inf")
        self._closed = False
        server = listen(host)
        self.address = address_of(server, announced)
        self._acceptor = Acceptor(server, token, _PURPOSE, self._welcome)

    def __enter__(self) -> MeetingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()
        with self._lock:
            self._closed = True
            for connection in self._connections.values():
                connection.close()

    def drain(self, timeout: float) -> None:
        """Wait until the workers that have ended have been heard to their last word."""
        deadline = time.monotonic() + timeout
        for reader in list(self._readers):
            reader.join(max(0.0, deadline - time.monotonic()))

    def result(self, rank: int, name: str) -> bytes | None:
        """What a worker has sent under a name; None where it has sent nothing."""
        with self._lock:
            parts = self._parts.get((rank, name))
            return None if parts is None else bytes(parts)

    def missing(self) -> tuple[list[int], float]:
        """Ranks that have not come yet, and seconds since the first has."""
        with self._lock:
            absent = [rank for rank, messages in self._messages.items() if not messages]
            return absent, max(0.0, time.monotonic() - self._first)

    def _welcome(self, connection: Stream, rank: int) -> None:
        with self._lock:
            is_known = 0 <= rank < self._workers and rank not in self._connections
            # A greeting may end after the door has been closed.
            is_expected = is_known and not self._closed
            if is_expected:
                self._connections[rank] = connection
        if not is_expected:  # Spark tries a task again; the others do not wait for it
            connection.close()
            return
        connection.keep_alive()
        reader = threading.Thread(target=self._read, args=(connection, rank), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, connection: Stream, rank: int) -> None:
        try:
            while line := connection.read_line(_LONGEST_LINE):
                self._take(rank, json.loads(line))
        except (OSError, ValueError, KeyError, TypeError):  # the worker is gone, or out of its mind
            pass
        finally:
            connection.close()

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "part":
            with self._lock:
                content = self._parts.setdefault((rank, event["name"]), bytearray())
                content += base64.b64decode(event["data"])
        elif event["event"] == "join":
            self._join(rank, event["message"])
        else:
            self.queue.put({**event, "rank": rank})

    def _join(self, rank: int, message: Any) -> None:
        with self._lock:
            self._first = min(self._first, time.monotonic())
            messages = self._messages[rank]
            messages.append(message)
            gathering = len(messages)
            if any(len(others) < gathering for others in self._messages.values()):
                return
            everyone = [self._messages[peer][gathering - 1] for peer in range(self._workers)]
            connections = list(self._connections.values())
        line = json.dumps(everyone).encode() + b"\n"
        for connection in connections:
            with contextlib.suppress(OSError):  # one that has died meanwhile
                connection.send_all(line)


class MeetingClient:
    """A worker's side.

    Parameters
    ----------
    address, token, rank
        Of the driver's `MeetingServer`, of the job, and of this worker.
    on_lost
        Called from a thread when the driver closes the connection.

    Raises
    ------
    ClusterError
        Where the driver cannot be reached.
    """

    def __init__(self, address: str, token: str, rank: int, on_lost: Callable[[], None]) -> None:
        self._rank = rank
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._connection = _connected_in_time(address, token, rank)
        except OSError as error:
            raise ClusterError(
                f"worker {rank} on {socket.gethostname()} cannot reach the driver at {address}: "
                f"{error}. Set spark.driver.host to an address of the driver that the executors "
                "reach, and open its ports to them"
            ) from error
        self._connection.keep_alive()
        self._answers: queue.Queue[list[Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __call__(self, event: dict[str, Any]) -> bool:
        """Send one event; returns whether it went out."""
        try:
            with self._lock:
                self._connection.send_all(json.dumps(event).encode() + b"\n")
        except OSError:
            return False
        return True

    def gather(self, message: Any) -> list[Any]:
        """Everyone's messages by rank, when all workers have sent theirs.

        Raises
        ------
        ClusterError
            Where the driver has given up.
        """
        self({"event": "join", "message": message})
        answer = self._answers.get()
        if answer is None:
            raise ClusterError("the driver has ended the job before all workers had met")
        return answer

    def send(self, name: str, content: bytes) -> None:
        """Send a result, whatever its size."""
        for start in range(0, max(1, len(content)), _PART):
            data = base64.b64encode(content[start : start + _PART]).decode()
            if not self({"event": "part", "name": name, "data": data}):
                raise ClusterError(f"worker {self._rank} has lost the driver while sending {name}")

    def close(self) -> None:
        """Close the connection, after what was sent has gone out."""
        self._closed = True
        self._connection.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := self._connection.read_line(_LONGEST_ANSWER):
                self._answers.put(json.loads(line))
        self._answers.put(None)
        if not self._closed:
            self._on_lost()


def _connected_in_time(address: str, token: str, rank: int) -> Stream:
    """Try again for a while: a door with a crowd before it turns people away."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return connect(address, token, rank, _PURPOSE, _CONNECT_SECONDS)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)
