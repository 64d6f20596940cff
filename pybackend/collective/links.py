"""Connections to other ranks."""

from __future__ import annotations

import errno

from pybackend.errors import ClusterError, PeerLostError
from pybackend.net.connection_errors import AlteredError
from pybackend.net.stream import Stream

_SOCKET_BUFFER = 4 << 20


class Link:
    """Authenticated connection to another rank, used in both directions.

    Parameters
    ----------
    stream
        Closed with this link.
    rank, host
        The other end.
    timeout
        Seconds after which a machine that does not answer counts as lost.
    """

    def __init__(self, stream: Stream, rank: int, host: str, timeout: float) -> None:
        self.stream = stream
        self.rank = rank
        self.host = host
        self.timeout = timeout
        stream.set_buffers(_SOCKET_BUFFER, _SOCKET_BUFFER)
        stream.probe(timeout)

    def send(self, window: list[memoryview]) -> int:
        """Send as much as the system accepts at present; returns the bytes, maybe 0."""
        try:
            return self.stream.send_some(window)
        except OSError as error:
            raise self._explain(error) from error

    def receive(self, window: list[memoryview]) -> int:
        """Receive what has arrived; returns the bytes, maybe 0."""
        try:
            return self.stream.receive_some(window)
        except OSError as error:
            raise self._explain(error) from error

    def peek(self, size: int) -> bytes | None:
        """Return the next bytes without receiving them; None without data, b"" at the end."""
        try:
            return self.stream.peek(size)
        except AlteredError as error:
            raise self._explain(error) from error
        except OSError:
            return b""

    def check(self) -> None:
        """Raise `PeerLostError` if the other machine has stopped answering."""
        if self.stream.is_unanswered(self.timeout):
            raise self._make_silence()

    def _explain(self, error: OSError) -> PeerLostError | ClusterError:
        if isinstance(error, AlteredError):
            return ClusterError(
                f"the connection to worker {self.rank} on {self.host} delivers other bytes than "
                f"were sent: {error}. They were not used. Something between the two hosts "
                "alters, repeats or drops data: a proxy, a broken device, or an attacker. "
                "Connect the hosts without it, then start again"
            )
        if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
            return self._make_silence()
        return self.make_error("closed the connection")

    def _make_silence(self) -> PeerLostError:
        return self.make_error(f"has not answered for {self.timeout:g} s")

    def make_error(self, reason: str) -> PeerLostError:
        """Make the error that names the other end."""
        return PeerLostError(self.rank, self.host, reason)

    def close(self) -> None:
        """Close the connection."""
        self.stream.close()
