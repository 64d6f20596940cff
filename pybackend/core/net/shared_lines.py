"""The connections of several processes over one pair of pipes: blocks, each with a rank."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from pybackend.core.net.stream import StreamEndError

# Most bytes of a block: the answers to workers are lines of any length.
_MOST = 1 << 30
# Blocks of a worker that nobody has read yet; then the other end waits.
_MOST_WAITING = 8


@dataclass(eq=False)
class SharedLines:
    """One end of a shared pair of pipes, ``writing`` without its own buffer.

    Both ends have the same class.
    """

    reading: IO[bytes]
    writing: IO[bytes]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.heard = time.monotonic()
        """Time of the last line from the other end."""
        self._connections: dict[int, _Connection] = {}

    def connect(self, rank: int) -> _Connection:
        """Return the connection of one worker. Must be called before `read`."""
        self._connections[rank] = connection = _Connection(self, rank)
        return connection

    def read(self) -> None:
        """Pass received lines on, until the other end closes."""
        with contextlib.suppress(OSError, ValueError, LookupError):
            while line := self.reading.readline():
                self.heard = time.monotonic()
                rank, _, size = line.partition(b" ")
                if size and not 0 <= int(size) <= _MOST:
                    raise ValueError(f"a block of {int(size)} bytes was announced")
                if size:  # otherwise it is only a sign of life
                    self._connections[int(rank)].put(self.reading.read(int(size)))
        for connection in self._connections.values():
            connection.put(b"")

    def beat(self) -> None:
        """Send a sign of life; raise `OSError` if the other end has closed."""
        self.write(b"\n")

    def write(self, content: bytes) -> None:
        # A write to a pipe without a buffer may write less than it is given.
        rest = memoryview(content)
        with self._lock:
            while rest:
                rest = rest[self.writing.write(rest) :]


@dataclass(eq=False)
class _Connection:
    """`LineStream` of one worker; a write waits for the pipe, without a time limit."""

    shared: SharedLines
    rank: int

    def __post_init__(self) -> None:
        self._waiting: queue.Queue[bytes] = queue.Queue(_MOST_WAITING)
        self._ahead = bytearray()
        self._has_ended = False
        self._is_closed = False

    @property
    def heard(self) -> float:
        """Time of the last line for any worker, because all of them are in one process."""
        return self.shared.heard

    def put(self, block: bytes) -> None:
        """Add a received block, or wait while too many are unread; an empty one marks the end."""
        if not self._is_closed:
            self._waiting.put(block)

    def read_line(self, limit: int, seconds: float | None = None) -> bytes:
        while (end := self._ahead.find(b"\n")) < 0 and len(self._ahead) < limit:
            if not self._receive(seconds):
                return b""
        if not 0 <= end < limit:
            raise ValueError(f"a line of more than {limit} bytes was received")
        return self._take(end + 1)

    def read_exactly(self, size: int, seconds: float | None = None) -> bytes:
        """Read exactly ``size`` bytes. If the connection ends earlier, raise `StreamEndError`."""
        while len(self._ahead) < size:
            if not self._receive(seconds):
                raise StreamEndError("the other end has closed the connection")
        return self._take(size)

    def _receive(self, seconds: float | None) -> bool:
        """Wait for a block; return False at the end."""
        if not self._has_ended:
            try:
                block = self._waiting.get(timeout=seconds)
            except queue.Empty:
                raise TimeoutError("the peer sent no data before the timeout") from None
            self._ahead += block
            self._has_ended = not block
        return not self._has_ended

    def _take(self, size: int) -> bytes:
        taken = bytes(self._ahead[:size])
        del self._ahead[:size]
        return taken

    def send_all(self, content: bytes, seconds: float | None = None) -> None:
        try:
            self.shared.write(f"{self.rank} {len(content)}\n".encode() + content)
        except ValueError as error:  # the pipe was closed from here
            raise BrokenPipeError(str(error)) from error

    def keep_alive(self) -> None:
        """Do nothing: the creator of the pipes notices if the other end is lost."""

    def close(self) -> None:
        """End this connection; the pipes stay open for the other workers."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):  # `put` may wait
            while True:
                self._waiting.get_nowait()
        self._waiting.put(b"")


# The system closes a connection whose data is not acknowledged: this detects a driver's machine
# that crashed, but not a driver that was only stopped.
_BEAT_SECONDS = 5.0


def follow_driver(
    lines: SharedLines, end: Callable[[], object], silent_seconds: float = math.inf
) -> threading.Thread:
    """Read from the driver, and send it heartbeats, in two threads.

    ``end`` ends this process; it is called when the connection to the driver is lost, or the driver
    was silent for ``silent_seconds``. Returns the thread that reads, which can be joined.
    """

    def read() -> None:
        lines.read()
        end()

    def beat() -> None:
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
