"""Connections to other ranks, and the streams of one collective call over them."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.errors import ClusterError, PeerLostError
from pybackend.net.stream import Stream, wait_any

Array = npt.NDArray[Any]

CHUNK = 1 << 18
"""Bytes that are sent, received and added at a time: few enough to stay in a core's cache."""

_SOCKET_BUFFER = 4 << 20
_HEADER = struct.Struct(">Qc3siQ")
# A peer at another exchange can only show on a link nobody waits for; it is looked at after this.
_SUSPICION_SECONDS = 0.05


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
        """Bytes sent, 0 if none can be at present."""
        try:
            return self.stream.send_some(window)
        except OSError as error:
            raise self.lost("closed the connection") from error

    def receive(self, window: list[memoryview]) -> int:
        """Bytes that had arrived, 0 if there are none at present."""
        try:
            return self.stream.receive_some(window)
        except OSError as error:
            raise self.lost("closed the connection") from error

    def peek(self, size: int) -> bytes | None:
        """What would be received next; None if there is nothing, b"" at the end."""
        try:
            return self.stream.peek(size)
        except OSError:
            return b""

    def lost(self, reason: str) -> PeerLostError:
        """The error that names the other end."""
        return PeerLostError(self.rank, self.host, reason)

    def close(self) -> None:
        """Close the connection."""
        self.stream.close()


class _Cursor:
    """A place in a sequence of buffers that are sent or filled one after another."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers
        self.index = 0
        self._position = 0

    def window(self, stop: int) -> list[memoryview]:
        """What comes next: one buffer's rest, but a header together with what follows it."""
        index, position = self.index, self._position
        first = self.buffers[index]
        if index == 0 and stop > 1:
            return [first[position:], self.buffers[1]]
        return [first[position:] if position else first]

    def advance(self, count: int) -> None:
        """Go on by so many bytes."""
        position = self._position + count
        while self.index < len(self.buffers) and position >= len(self.buffers[self.index]):
            position -= len(self.buffers[self.index])
            self.index += 1
        self._position = position


class Call:
    """One collective call on one rank: what it is, and patience with the peers that take part.

    Each peer's first message begins with the header; a different one is an error before anything
    behind it is used. So workers that got out of step fail, and need no round trip to find out.

    Parameters
    ----------
    rank
        This rank.
    links
        All links of this rank.
    timeout
        Seconds without any progress after which a peer counts as lost.
    number, kind, detail, dtype, size
        What must be the same on all ranks: the how manieth call, which collective, its root or
        codec, the elements' type, and bytes.
    """

    def __init__(
        self,
        rank: int,
        links: Iterable[Link],
        timeout: float,
        *,
        number: int,
        kind: bytes,
        detail: int,
        dtype: np.dtype[Any],
        size: int,
    ) -> None:
        self._rank = rank
        self._links = links
        self._timeout = timeout
        self._number = number
        self._heard: set[int] = set()
        self._told: set[int] = set()
        self._header = _HEADER.pack(number, kind, dtype.str.encode()[-3:], detail, size)

    def flow(
        self,
        out: Link | None,
        outgoing: Sequence[memoryview],
        into: Link | None,
        incoming: Sequence[memoryview],
        *,
        ready: int | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Send buffers over one link while filling others from another link (or the same).

        Parameters
        ----------
        out, outgoing
            Where to send, and what, in order; None sends nothing.
        into, incoming
            From where to receive, and where to; None receives nothing. The same memory may
            occur again: a buffer is filled once that before it was handed to ``arrived``.
        ready
            How many outgoing buffers may be sent at once, all by default. Each incoming one
            that is complete allows one more.
        arrived
            Called with the number of each incoming buffer when it is complete.

        Raises
        ------
        PeerLostError
            At once where a peer closes its connection, after the timeout where it is silent.
        ClusterError
            Where the peer is at another collective call.
        """
        theirs = memoryview(bytearray(_HEADER.size))
        sending = _Cursor([memoryview(self._header), *outgoing] if out else [])
        receiving = _Cursor([theirs, *incoming] if into else [])
        may_send = len(sending.buffers) if ready is None else 1 + ready
        deadline = None
        while sending.index < len(sending.buffers) or receiving.index < len(receiving.buffers):
            moved = 0
            allowed = min(may_send, len(sending.buffers))
            if out and sending.index < allowed:
                moved += (count := self._send(out, sending.window(allowed)))
                sending.advance(count)
            before = receiving.index
            if into and before < len(receiving.buffers):
                moved += (count := into.receive(receiving.window(len(receiving.buffers))))
                receiving.advance(count)
                if before == 0 and count:
                    self._heard.add(into.rank)
            if receiving.index != before:
                may_send += self._complete(into, theirs, before, receiving.index, arrived)
            if moved:
                deadline = None
                continue
            deadline = deadline or time.monotonic() + self._timeout
            self._wait(
                into if receiving.index < len(receiving.buffers) else None,
                out if sending.index < allowed else None,
                deadline,
            )

    def _complete(
        self,
        into: Link | None,
        theirs: memoryview,
        first: int,
        stop: int,
        arrived: Callable[[int], None] | None,
    ) -> int:
        """Use the received buffers from ``first`` to ``stop``; how many hold data."""
        if first == 0 and into:
            self._verify(into, bytes(theirs))
            first = 1
        if arrived:
            for index in range(first, stop):
                arrived(index - 1)
        return stop - first

    def _send(self, out: Link, window: list[memoryview]) -> int:
        self._told.add(out.rank)
        try:
            return out.send(window)
        except PeerLostError:
            # It may have left because of a different header: then its own one says more.
            self._suspect(out)
            raise

    def _wait(self, reading: Link | None, writing: Link | None, deadline: float) -> None:
        reads = [reading.stream] if reading else []
        writes = [writing.stream] if writing else []
        soon = min(max(0.0, deadline - time.monotonic()), _SUSPICION_SECONDS)
        if reading and not writing:
            if reading.stream.wait_readable(soon):
                return
        elif wait_any(reads, writes, soon):
            return
        watched = [link for link in self._links if link is not reading and self._suspect(link)]
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            happened = wait_any([*reads, *(link.stream for link in watched)], writes, remaining)
            if not happened:
                peer = reading or writing
                assert peer is not None
                raise peer.lost(f"was silent for {self._timeout:g} s")
            watched = [
                link for link in watched if link.stream not in happened or self._suspect(link)
            ]
            if any(stream in happened for stream in (*reads, *writes)):
                return

    def _suspect(self, link: Link) -> bool:
        """Look at a header nobody reads now; whether there is nothing yet.

        A peer may be ahead, and one that is done may be gone: only a header of this call or of
        an earlier one that differs is an error.
        """
        if link.rank in self._heard:
            return False
        theirs = link.peek(_HEADER.size)
        if theirs is None:
            return True
        if len(theirs) == _HEADER.size and _HEADER.unpack(theirs)[0] <= self._number:
            self._verify(link, theirs)
        return False

    def _verify(self, link: Link, theirs: bytes) -> None:
        if theirs != self._header:
            if link.rank not in self._told:
                # A peer from which this rank only receives learns of it too.
                with contextlib.suppress(PeerLostError):
                    link.send([memoryview(self._header)])
            raise ClusterError(
                f"workers {link.rank} and {self._rank} are at different exchanges "
                f"({_HEADER.unpack(theirs)} and {_HEADER.unpack(self._header)}: number, kind, "
                "type, root or codec, bytes): the model, a callback or a train_step does "
                "something else on one of them"
            )


def bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array; an empty array has none that could be viewed."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())


def chunks(raw: memoryview) -> list[memoryview]:
    """A buffer in pieces of `CHUNK` bytes, the last of them shorter; none of an empty one."""
    return [raw[start : start + CHUNK] for start in range(0, len(raw), CHUNK)]
