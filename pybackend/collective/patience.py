"""How long a rank waits for its peers: a slow one is waited for, a lost one is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pybackend.collective.links import Link

# Files are read at different speeds, and a callback may do what it likes.
LONGEST_SECONDS = 6 * 3600.0
_FIRST_WORD_SECONDS = 60.0
# All ranks that wait say so in this time; the one for whom they wait is the one that does not.
_SETTLED_SECONDS = 2.0


@dataclass
class Patience:
    """What a rank makes of a peer that does not come.

    Parameters
    ----------
    on_wait
        Called once a minute: the peer's rank, for how many seconds this rank has waited, and
        whether that is the second word about the same minute, by which all ranks have said theirs.
    longest
        Seconds after which a peer counts as lost though its machine answers.

    Attributes
    ----------
    waited
        Seconds in which this rank could not go on, all in all.
    """

    on_wait: Callable[[int, float, bool], object] | None = None
    longest: float = LONGEST_SECONDS
    waited: float = 0.0
    _next: float = _FIRST_WORD_SECONDS
    _since: float = 0.0
    _is_second: bool = False

    def check(self, peers: Sequence[Link], since: float) -> None:
        """Raise `PeerLostError` if a peer is lost; speak of the wait if it is long.

        Parameters
        ----------
        peers
            Those without whom this rank cannot go on.
        since
            When, by the monotonic clock, it has last been able to.
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
