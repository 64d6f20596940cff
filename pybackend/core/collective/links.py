"""Connections to other ranks, and how long to wait for a slow one."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pybackend.core.errors import ClusterError, PeerLostError
from pybackend.core.net.stream import AlteredError, Stream

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
        """Send as much as the system accepts now; return the number of bytes, possibly 0."""
        try:
            return self.stream.send_some(window)
        except OSError as error:
            raise self._explain(error) from error

    def receive(self, window: list[memoryview]) -> int:
        """Receive what has arrived; return the number of bytes, possibly 0."""
        try:
            return self.stream.receive_some(window)
        except OSError as error:
            raise self._explain(error) from error

    def peek(self, size: int) -> bytes | None:
        """Return the next bytes without consuming them; None if there are none, b"" at the end."""
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
                f"the connection to worker {self.rank} on {self.host} delivered different bytes "
                f"than were sent: {error}. They were discarded. Something between the two hosts "
                "alters, repeats or drops data: a proxy, a broken device, or an attacker. Connect "
                "the hosts without it, then start again"
            )
        if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
            return self._make_silence()
        return self.make_error("closed the connection")

    def _make_silence(self) -> PeerLostError:
        return self.make_error(f"has not answered for {self.timeout:g} s")

    def make_error(self, reason: str) -> PeerLostError:
        """Create the error that names the other end."""
        return PeerLostError(self.rank, self.host, reason)

    def close(self) -> None:
        """Close the connection."""
        self.stream.close()


# Files are read at different speeds, and a callback may take long.
LONGEST_SECONDS = 6 * 3600.0
_FIRST_WORD_SECONDS = 60.0
# All waiting ranks report it within this time; the rank that they wait for does not.
_SETTLED_SECONDS = 2.0


@dataclass
class Patience:
    """Limits on the wait for a peer that does not join a call, and reports about it.

    Parameters
    ----------
    on_wait
        Called twice a minute with the peer's rank, how many seconds this rank has waited, and
        whether this is the second report of the minute. By then all ranks have sent the first one.
    longest
        Seconds after which a peer counts as lost although its machine answers.

    Attributes
    ----------
    waited
        Total seconds that this rank has waited.
    """

    on_wait: Callable[[int, float, bool], object] | None = None
    longest: float = LONGEST_SECONDS
    waited: float = 0.0
    _next: float = _FIRST_WORD_SECONDS
    _since: float = 0.0
    _is_second: bool = False

    def check(self, peers: Sequence[Link], since: float) -> None:
        """Raise `PeerLostError` if a peer is lost; report a long wait.

        Parameters
        ----------
        peers
            Peers that this rank waits for.
        since
            Start of the wait, on the monotonic clock.
        """
        waited = time.monotonic() - since
        for peer in peers:
            if waited >= peer.timeout:
                peer.check()
        if waited >= self.longest:
            raise peers[0].make_error(f"was silent for {self.longest:g} s")
        if since != self._since:
            self._since, self._next, self._is_second = since, _FIRST_WORD_SECONDS, False
        if waited >= self._next and self.on_wait is not None:
            self.on_wait(peers[0].rank, waited, self._is_second)
            pause = _FIRST_WORD_SECONDS - _SETTLED_SECONDS if self._is_second else _SETTLED_SECONDS
            self._next += pause
            self._is_second = not self._is_second
