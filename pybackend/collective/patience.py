"""Waiting for peers: a rank waits for a slow peer, but not for a lost one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pybackend.collective.links import Link

# Files are read at different speeds, and a callback may take long.
LONGEST_SECONDS = 6 * 3600.0
_FIRST_WORD_SECONDS = 60.0
# All waiting ranks report it within this time; the rank that they wait for does not.
_SETTLED_SECONDS = 2.0


@dataclass
class Patience:
    """Limits and reports of the wait for a peer that does not join a call.

    Parameters
    ----------
    on_wait
        Called twice a minute with the peer's rank, the seconds that this rank has waited, and
        whether it is the second report of the minute, by which time all ranks have sent the first.
    longest
        Seconds after which a peer counts as lost although its machine answers.

    Attributes
    ----------
    waited
        Seconds in which this rank has waited, in total.
    """

    on_wait: Callable[[int, float, bool], object] | None = None
    longest: float = LONGEST_SECONDS
    waited: float = 0.0
    _next: float = _FIRST_WORD_SECONDS
    _since: float = 0.0
    _is_second: bool = False

    def check(self, peers: Sequence[Link], since: float) -> None:
        """Raise `PeerLostError` if a peer is lost; report the wait if it is long.

        Parameters
        ----------
        peers
            Peers that this rank waits for.
        since
            Start of the wait, by the monotonic clock.
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
