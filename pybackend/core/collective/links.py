"""Connections to other ranks, how long to wait for a slow one, and one call over several."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pybackend.core.errors import ClusterError, PeerLostError
from pybackend.core.net.stream import AlteredError, Stream, wait_any

_SOCKET_BUFFER = 4 << 20


class Link:
    """Authenticated connection to another rank, used in both directions; it closes ``stream``.

    ``rank`` and ``host`` are the other end. A machine that does not answer for ``timeout`` seconds
    counts as lost.
    """

    def __init__(self, stream: Stream, rank: int, host: str, timeout: float) -> None:
        self.stream, self.rank, self.host, self.timeout = stream, rank, host, timeout
        stream.set_buffers(_SOCKET_BUFFER, _SOCKET_BUFFER)
        stream.probe(timeout)

    def send(self, window: list[memoryview]) -> int:
        """Send as much as the system accepts now; return the number of bytes, possibly 0."""
        try:
            return self.stream.send_some(window)
        except OSError as error:
            raise self._explain(error) from error

    def receive(self, window: list[memoryview]) -> int:
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
        return PeerLostError(self.rank, self.host, reason)

    def close(self) -> None:
        self.stream.close()


# Files are read at different speeds, and a callback may take long.
LONGEST_SECONDS = 6 * 3600.0
_FIRST_WORD_SECONDS = 60.0
# All waiting ranks report it within this time; the rank that they wait for does not.
_SETTLED_SECONDS = 2.0


@dataclass
class Patience:
    """Limits on the wait for a peer that does not join a call, and reports about it.

    ``on_wait`` is called twice a minute with the peer's rank, how many seconds this rank has
    waited, and whether this is the second report of the minute. By then all ranks have sent the
    first one.
    """

    on_wait: Callable[[int, float, bool], object] | None = None
    longest: float = LONGEST_SECONDS  # then a peer counts as lost although its machine answers
    waited: float = 0.0  # total seconds that this rank has waited
    _since: float = 0.0
    _reports: int = 0  # of this wait

    def check(self, peers: Sequence[Link], since: float, rank: int | None = None) -> None:
        """Raise `PeerLostError` if a peer is lost; report a long wait, which began at ``since``.

        ``rank`` is the one that is waited for; None: the first peer.
        """
        rank = peers[0].rank if rank is None else rank
        waited = time.monotonic() - since
        for peer in peers:
            if waited >= peer.timeout:
                peer.check()
        if waited >= self.longest:
            raise PeerLostError(rank, peers[0].host, f"was silent for {self.longest:g} s")
        if since != self._since:
            self._since, self._reports = since, 0
        minutes, is_second = divmod(self._reports, 2)
        due = _FIRST_WORD_SECONDS * (minutes + 1) + _SETTLED_SECONDS * is_second
        if waited >= due and self.on_wait is not None:
            self.on_wait(rank, waited, bool(is_second))
            self._reports += 1


_HEADER = struct.Struct(">Qc3siQ")
# A peer at another exchange may only show on a link that is not read; these are checked after this.
_SUSPICION_SECONDS = 0.05
_LOOK_SECONDS = 0.25
# Turns of the core that are left to other ranks of the host, and pauses afterwards.
_YIELDS = 30
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 50e-6, 2e-3


class _Cursor:
    """Position in a sequence of buffers that are sent or filled one after another."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers
        self.index = 0
        self._position = 0

    def window(self, stop: int) -> list[memoryview]:
        """Return the rest of the current buffer; a header comes with the buffer that follows it."""
        index, position = self.index, self._position
        first = self.buffers[index]
        if index == 0 and stop > 1:
            return [first[position:], self.buffers[1]]
        return [first[position:] if position else first]

    def advance(self, count: int) -> None:
        position = self._position + count
        while self.index < len(self.buffers) and position >= len(self.buffers[self.index]):
            position -= len(self.buffers[self.index])
            self.index += 1
        self._position = position


Arrived = Callable[[int], None]


class Call:
    """One collective call on one rank, over its ``links``.

    Each peer's first message begins with a header. If it differs from this rank's header, the call
    fails before any data that follows is used. So workers that are out of step are detected without
    an extra round trip. ``header`` has the values that must be the same on all ranks: the number of
    the call, the kind of collective, the element type, the root or codec, and the number of bytes.
    """

    def __init__(
        self, rank: int, links: Iterable[Link], patience: Patience, header: tuple[Any, ...]
    ) -> None:
        self._rank, self._links, self._patience, self._number = rank, links, patience, header[0]
        self._received_from: set[int] = set()
        self._sent_to: set[int] = set()
        self._header = _HEADER.pack(*header)

    def flow(
        self,
        out: Link | None,
        outgoing: Sequence[memoryview],
        into: Link | None,
        incoming: Sequence[memoryview],
        *,
        ready: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Send buffers over one link while filling others from another link, or the same one.

        The same memory may occur more than once in ``incoming``: it is filled again only after
        ``arrived``, which gets the index of each complete buffer, has handled the previous one.
        ``ready`` is how many outgoing buffers may be sent at once, by default all; each completed
        incoming buffer allows one more.

        Raises `PeerLostError` at once if a peer closes its connection, later if its machine does
        not answer; and `ClusterError` if the peer is in a different collective call.
        """
        theirs = memoryview(bytearray(_HEADER.size))
        sending = _Cursor([memoryview(self._header), *outgoing] if out else [])
        receiving = _Cursor([theirs, *incoming] if into else [])
        may_send = len(sending.buffers) if ready is None else 1 + ready
        since = None
        while sending.index < len(sending.buffers) or receiving.index < len(receiving.buffers):
            moved = 0
            allowed = min(may_send, len(sending.buffers))
            if out and sending.index < allowed:
                self._sent_to.add(out.rank)
                moved += (count := self._move(out.send, sending.window(allowed)))
                sending.advance(count)
            before = receiving.index
            if into and before < len(receiving.buffers):
                window = receiving.window(len(receiving.buffers))
                moved += (count := self._move(into.receive, window))
                receiving.advance(count)
                if before == 0 and count:
                    self._received_from.add(into.rank)
            if receiving.index != before:
                may_send += self._complete(into, theirs, before, receiving.index, arrived)
            if moved:
                if since is not None:
                    self._patience.waited += time.monotonic() - since
                since = None
                continue
            since = since or time.monotonic()
            self._wait(
                into if receiving.index < len(receiving.buffers) else None,
                out if sending.index < allowed else None,
                since,
            )

    def wait_for(self, find_missing: Callable[[], Sequence[int]], near: Sequence[Link]) -> None:
        """Wait until no rank of this host, which have all joined the call, is missing.

        ``near`` has the links to ranks of this host: those of other hosts may have finished. Raises
        the errors of `flow`.
        """
        for _ in range(_YIELDS):
            if not find_missing():
                return
            os.sched_yield()
        since = looked = time.monotonic()
        pause = _SHORTEST_PAUSE_SECONDS
        while missing := find_missing():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if time.monotonic() >= looked + _SUSPICION_SECONDS:
                looked = time.monotonic()
                first = sorted(near, key=lambda link: link.rank not in missing)
                for link in first:
                    if link.peek(1) == b"" and find_missing():
                        for other in self._links:  # the peer may have left because the calls differ
                            self._check_header(other)
                        raise link.make_error("closed the connection")
                self._patience.check(first, since, missing[0])
        self._patience.waited += time.monotonic() - since

    def _complete(
        self, into: Link | None, theirs: memoryview, first: int, stop: int, arrived: Arrived | None
    ) -> int:
        """Use the received buffers from ``first`` to ``stop``; return how many contain data."""
        if first == 0 and into:
            self._verify(into, bytes(theirs))
            first = 1
        if arrived:
            for index in range(first, stop):
                arrived(index - 1)
        return stop - first

    def _move(self, move: Callable[[list[memoryview]], int], window: list[memoryview]) -> int:
        try:
            return move(window)
        except PeerLostError:  # the peer may have left because the calls differ
            for link in self._links:
                self._check_header(link)
            raise

    def _wait(self, reading: Link | None, writing: Link | None, since: float) -> None:
        reads = [reading.stream] if reading else []
        writes = [writing.stream] if writing else []
        if reading and not writing:
            if reading.stream.wait_readable(_SUSPICION_SECONDS):
                return
        elif wait_any(reads, writes, _SUSPICION_SECONDS):
            return
        watched = [link for link in self._links if link is not reading and self._check_header(link)]
        while True:
            happened = wait_any([*reads, *(link.stream for link in watched)], writes, _LOOK_SECONDS)
            if not happened:
                self._patience.check([link for link in (reading, writing) if link], since)
            watched = [
                link for link in watched if link.stream not in happened or self._check_header(link)
            ]
            if any(stream in happened for stream in (*reads, *writes)):
                return

    def _check_header(self, link: Link) -> bool:
        """Check a header on a link that is not being read; return whether none has arrived yet.

        A peer may be ahead, and one that has finished may have exited, so a different header is an
        error only if it belongs to this call or an earlier one.
        """
        if link.rank in self._received_from:
            return False
        theirs = link.peek(_HEADER.size)
        if theirs is None:
            return True
        if len(theirs) == _HEADER.size and _HEADER.unpack(theirs)[0] <= self._number:
            self._verify(link, theirs)
        return False

    def _verify(self, link: Link, theirs: bytes) -> None:
        if theirs != self._header:
            if link.rank not in self._sent_to:
                # So that a peer from which this rank only receives detects it, too.
                with contextlib.suppress(PeerLostError):
                    link.send([memoryview(self._header)])
            raise ClusterError(
                f"workers {link.rank} and {self._rank} are at different exchanges "
                f"({_HEADER.unpack(theirs)} and {_HEADER.unpack(self._header)}: number, kind, "
                "type, root or codec, bytes): the model, a callback or a train_step behaves "
                "differently on one of them"
            )
