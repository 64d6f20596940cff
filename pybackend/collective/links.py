"""Connections to other ranks."""

from __future__ import annotations

from pybackend.errors import PeerLostError
from pybackend.net.stream import Stream

_SOCKET_BUFFER = 4 << 20


class Link:
    """One authenticated connection to another rank, used in both directions.

    Parameters
    ----------
    stream
        Closed with this link.
    rank, host
        The other end.
    """

    def __init__(self, stream: Stream, rank: int, host: str) -> None:
        self.stream = stream
        self.rank = rank
        self.host = host
        stream.set_buffers(_SOCKET_BUFFER, _SOCKET_BUFFER)

    def send(self, window: list[memoryview]) -> int:
        """Send what the system takes at present; bytes, maybe 0."""
        try:
            return self.stream.send_some(window)
        except OSError as error:
            raise self.make_error("closed the connection") from error

    def receive(self, window: list[memoryview]) -> int:
        """Receive what has arrived; bytes, maybe 0."""
        try:
            return self.stream.receive_some(window)
        except OSError as error:
            raise self.make_error("closed the connection") from error

    def peek(self, size: int) -> bytes | None:
        """Look at what would be received next; None if there is nothing, b"" at the end."""
        try:
            return self.stream.peek(size)
        except OSError:
            return b""

    def make_error(self, reason: str) -> PeerLostError:
        """Make the error that names the other end."""
        return PeerLostError(self.rank, self.host, reason)

    def close(self) -> None:
        """Close the connection."""
        self.stream.close()
