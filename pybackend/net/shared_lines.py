"""The connections of several members over one pair of pipes: lines, each behind a rank."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import IO


class SharedLines:
    """One end of such a pair of pipes; both ends are alike.

    Parameters
    ----------
    reading, writing
        Pipes from and to the other end; ``writing`` without a buffer of its own.

    Attributes
    ----------
    heard
        When the other end was last heard of, by `time.monotonic`.
    """

    def __init__(self, reading: IO[bytes], writing: IO[bytes]) -> None:
        self._reading = reading
        self._writing = writing
        self._lock = threading.Lock()
        self.heard = time.monotonic()
        self._connections: dict[int, _Connection] = {}

    def connect(self, rank: int) -> _Connection:
        """The connection of one member; to be called before `read`."""
        self._connections[rank] = connection = _Connection(self, rank)
        return connection

    def read(self) -> None:
        """Pass on what comes, until the other end is gone."""
        with contextlib.suppress(OSError, ValueError, LookupError):
            while line := self._reading.readline():
                self.heard = time.monotonic()
                rank, _, content = line.partition(b" ")
                if content:  # else it only shows that the other end is there
                    self._connections[int(rank)].put(content)
        for connection in self._connections.values():
            connection.put(b"")

    def beat(self) -> None:
        """Show the other end that this one is there.

        Raises
        ------
        OSError
            If the other end is gone.
        """
        self.write(b"\n")

    def write(self, line: bytes) -> None:
        """Write a line in one piece."""
        rest = memoryview(line)
        with self._lock:
            while rest:
                rest = rest[self._writing.write(rest) :]


class _Connection:
    """What one member has of it, as `LineStream`; a write waits for the pipe, without a limit."""

    def __init__(self, shared: SharedLines, rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self._waiting: queue.Queue[bytes] = queue.Queue()
        self._has_ended = False

    @property
    def heard(self) -> float:
        """As in `LineStream`, of any member: all of them are in one process."""
        return self._shared.heard

    def put(self, line: bytes) -> None:
        """Add a line that has come; an empty one is the end."""
        self._waiting.put(line)

    def read_line(self, limit: int, seconds: float | None = None) -> bytes:
        """As in `LineStream`."""
        if self._has_ended:
            return b""
        try:
            line = self._waiting.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError("the other end was silent for too long") from None
        self._has_ended = not line
        if len(line) > limit:
            raise ValueError(f"a line of more than {limit} bytes was received")
        return line

    def send_all(self, content: bytes, seconds: float | None = None) -> None:
        """As in `LineStream`."""
        try:
            self._shared.write(f"{self._rank} ".encode() + content)
        except ValueError as error:  # the pipe was closed from here
            raise BrokenPipeError(str(error)) from error

    def keep_alive(self) -> None:
        """As in `LineStream`: whoever has made the pipes sees to it."""

    def close(self) -> None:
        """As in `LineStream`; the pipes stay open for the other members."""
        self.put(b"")
