"""The connections of several processes over one pair of pipes: lines, each with a rank."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import IO, NoReturn


class SharedLines:
    """One end of a shared pair of pipes; both ends have the same class.

    Parameters
    ----------
    reading, writing
        Pipes from and to the other end; ``writing`` without its own buffer.

    Attributes
    ----------
    heard
        Time of the last line from the other end, as in `time.monotonic`.
    """

    def __init__(self, reading: IO[bytes], writing: IO[bytes]) -> None:
        self._reading = reading
        self._writing = writing
        self._lock = threading.Lock()
        self.heard = time.monotonic()
        self._connections: dict[int, _Connection] = {}

    def connect(self, rank: int) -> _Connection:
        """Return the connection of one worker. Must be called before `read`."""
        self._connections[rank] = connection = _Connection(self, rank)
        return connection

    def read(self) -> None:
        """Pass received lines on, until the other end closes."""
        with contextlib.suppress(OSError, ValueError, LookupError):
            while line := self._reading.readline():
                self.heard = time.monotonic()
                rank, _, content = line.partition(b" ")
                if content:  # otherwise it is only a sign of life
                    self._connections[int(rank)].put(content)
        for connection in self._connections.values():
            connection.put(b"")

    def beat(self) -> None:
        """Send a sign of life.

        Raises
        ------
        OSError
            The other end has closed.
        """
        self.write(b"\n")

    def write(self, line: bytes) -> None:
        """Write a complete line."""
        rest = memoryview(line)
        with self._lock:
            while rest:
                rest = rest[self._writing.write(rest) :]


class _Connection:
    """`LineStream` of one worker; a write waits for the pipe, without a time limit."""

    def __init__(self, shared: SharedLines, rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self._waiting: queue.Queue[bytes] = queue.Queue()
        self._has_ended = False

    @property
    def heard(self) -> float:
        """Time of the last line for any worker, because all of them are in one process."""
        return self._shared.heard

    def put(self, line: bytes) -> None:
        """Add a received line; an empty one marks the end."""
        self._waiting.put(line)

    def read_line(self, limit: int, seconds: float | None = None) -> bytes:
        """Read a line."""
        if self._has_ended:
            return b""
        try:
            line = self._waiting.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError("the peer sent no data before the timeout") from None
        self._has_ended = not line
        if len(line) > limit:
            raise ValueError(f"a line of more than {limit} bytes was received")
        return line

    def send_all(self, content: bytes, seconds: float | None = None) -> None:
        """Send all bytes."""
        try:
            self._shared.write(f"{self._rank} ".encode() + content)
        except ValueError as error:  # the pipe was closed from here
            raise BrokenPipeError(str(error)) from error

    def keep_alive(self) -> None:
        """Do nothing: the creator of the pipes notices if the other end is lost."""

    def close(self) -> None:
        """End this connection; the pipes stay open for the other workers."""
        self.put(b"")


# The system closes a connection whose data is not acknowledged: this detects a driver's machine
# that crashed, but not a driver that was only stopped.
_BEAT_SECONDS = 5.0


def follow_driver(
    lines: SharedLines, end: Callable[[], NoReturn], silent_seconds: float = math.inf
) -> threading.Thread:
    """Read from the driver, and send it heartbeats, in two threads.

    Parameters
    ----------
    lines
        Connection to the driver.
    end
        Ends this process; called when the connection to the driver is lost.
    silent_seconds
        Maximum seconds for which the driver may be silent.

    Returns
    -------
    threading.Thread
        The thread that reads, which can be joined.
    """

    def read() -> NoReturn:
        lines.read()
        end()

    def beat() -> NoReturn:
        while time.monotonic() < lines.heard + silent_seconds:
            time.sleep(_BEAT_SECONDS)
            try:
                lines.beat()
            except OSError:
                break
        end()

    threading.Thread(target=beat, daemon=True).start()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader
