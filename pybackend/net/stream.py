"""Connections between processes: all that the package asks of a connected socket.

A TLS socket can do all of it, too. It reads and writes one buffer at a time, it cannot peek, it may
hold bytes that the system no longer reports as readable, and no thread may block inside it while
another one uses it. So `Stream` keeps what it has read ahead, and waits outside the socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Sequence

_BLOCK = 1 << 16


class StreamEndError(ConnectionError):
    """The other end has closed the connection, and all that it sent has been read."""


class Stream:
    """One connection, used in both directions: one thread may read while another one writes.

    The socket never blocks. A method with a limit in seconds tries, waits until the socket is
    ready, and tries again; None waits without a limit. All methods raise `OSError` if the
    connection fails, `TimeoutError` (which is one) if the time is over.

    A subclass for another kind of socket replaces `connect`, `accept`, `send_some`, `_receive` and
    `has_pending`, and says by `reads_on` and `writes_on` what they wait for.

    Parameters
    ----------
    connection
        A connected TCP socket, closed with this stream.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._ahead = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readable = select.poll()
        self.reads_on = select.POLLIN
        self.writes_on = select.POLLOUT

    @property
    def reads_on(self) -> int:
        """What the system must report before it is worth while to read again."""
        return self._reads_on

    @reads_on.setter
    def reads_on(self, mask: int) -> None:
        self._reads_on = mask
        try:
            self._readable.register(self.socket, mask)
        except ValueError:  # another thread has closed it
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    @classmethod
    def connect(cls, address: tuple[str, int], seconds: float) -> Stream:
        """Connect to a host and port."""
        return cls(socket.create_connection(address, seconds))

    @classmethod
    def accept(cls, server: socket.socket) -> Stream:
        """Wait for the next connection to a listening socket."""
        return cls(server.accept()[0])

    def send_some(self, buffers: list[memoryview]) -> int:
        """Send from the first of some buffers on; bytes sent, 0 if none can be at present."""
        try:
            if len(buffers) == 1:
                return self.socket.send(buffers[0])
            return self.socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def receive_some(self, buffers: list[memoryview]) -> int:
        """Fill buffers, none of them empty, from the first on; bytes received, 0 if none are there.

        Raises
        ------
        StreamEndError
            When the other end has closed the connection.
        """
        return self._take_ahead(buffers[0]) if self._ahead else self._receive(buffers)

    def send_all(self, content: bytes, seconds: float | None = None) -> None:
        """Send all bytes."""
        deadline = _deadline(seconds)
        rest = memoryview(content)
        while rest:
            sent = self.send_some([rest])
            rest = rest[sent:]
            if not sent and not wait_any([], [self], _remaining(deadline)):
                raise TimeoutError(f"the other end has not read for {seconds:g} s")

    def read_exactly(self, size: int, seconds: float | None = None) -> bytes:
        """Read so many bytes, and not one more. An earlier end is a `StreamEndError`."""
        deadline = _deadline(seconds)
        content = bytearray(size)
        rest = memoryview(content)
        while rest:
            count = self._take_ahead(rest) or self._receive_in_time(rest, deadline)
            rest = rest[count:]
        return bytes(content)

    def read_line(self, limit: int, seconds: float | None = None) -> bytes:
        r"""Read up to the next ``\n`` and return the line with it.

        Returns
        -------
        bytes
            ``b""`` at the end; a last line without ``\n`` is dropped.

        Raises
        ------
        ValueError
            For a line of more than ``limit`` bytes.
        """
        deadline = _deadline(seconds)
        searched = 0
        while (end := self._ahead.find(b"\n", searched)) < 0:
            searched = len(self._ahead)
            if searched >= limit:
                break
            block = memoryview(bytearray(_BLOCK))
            try:
                self._ahead += block[: self._receive_in_time(block, deadline)]
            except StreamEndError:
                return b""
        if not 0 <= end < limit:
            raise ValueError(f"a line of more than {limit} bytes was received")
        line = bytes(self._ahead[: end + 1])
        del self._ahead[: end + 1]
        return line

    def peek(self, size: int, seconds: float = 0.0) -> bytes | None:
        """Look at the next bytes without taking them, up to ``size``.

        Returns
        -------
        bytes or None
            None if nothing has come in time, ``b""`` at the end or if the connection was reset.
        """
        deadline = _deadline(seconds)
        block = memoryview(bytearray(size))
        has_ended = False
        try:
            while len(self._ahead) < size:
                count = self._receive([block[: size - len(self._ahead)]])
                self._ahead += block[:count]
                if not count and (self._ahead or not self._wait(_remaining(deadline))):
                    break
        except ConnectionError:
            has_ended = True
        seen = bytes(self._ahead[:size])
        return seen if seen or has_ended else None

    def has_pending(self) -> bool:
        """Whether bytes were received that the system no longer reports as readable."""
        return bool(self._ahead)

    def wait_readable(self, seconds: float | None) -> bool:
        """Whether there is anything to read, be it the end, within some seconds."""
        return self.has_pending() or self._wait(seconds)

    def set_buffers(self, sending: int, receiving: int) -> None:
        """Set how many bytes the system keeps in either direction."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sending)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receiving)

    def keep_alive(self) -> None:
        """Have the system notice within half a minute that the other machine is gone."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": 10,
            "TCP_KEEPINTVL": 5,
            "TCP_KEEPCNT": 3,
            # Keepalive rests while sent bytes wait for an answer; this does not. In milliseconds.
            "TCP_USER_TIMEOUT": 30_000,
        }
        for name, value in options.items():
            if hasattr(socket, name):  # macOS has other names for them
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close(self) -> None:
        """Close the connection, and wake a thread that waits for it."""
        with contextlib.suppress(OSError):
            # Closing alone wakes no thread. Not SSLSocket.shutdown(): it goes back to plain text.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        self.socket.close()

    def _receive(self, buffers: list[memoryview]) -> int:
        try:
            if len(buffers) == 1:
                count = self.socket.recv_into(buffers[0])
            else:
                count = self.socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return 0
        if count == 0:
            raise StreamEndError("the other end has closed the connection")
        return count

    def _receive_in_time(self, buffer: memoryview, deadline: float | None) -> int:
        """Receive a byte at least, behind what was read ahead."""
        while not (count := self._receive([buffer])):
            if not self._wait(_remaining(deadline)):
                raise TimeoutError("the other end was silent for too long")
        return count

    def _take_ahead(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._ahead))
        buffer[:count] = self._ahead[:count]
        del self._ahead[:count]
        return count

    def _wait(self, seconds: float | None) -> bool:
        return bool(self._readable.poll(_milliseconds(seconds)))


def wait_any(
    reading: Sequence[Stream], writing: Sequence[Stream], seconds: float | None
) -> list[Stream]:
    """Wait until some streams can be read or written.

    Returns
    -------
    list of Stream
        Those that can, or have failed; empty if the time is over first.
    """
    pending = [stream for stream in reading if stream.has_pending()]
    if pending:
        return pending
    # poll, not select: select cannot take descriptors above 1023.
    poller = select.poll()
    masks: dict[int, int] = {}
    streams: dict[int, Stream] = {}
    wanted = [(stream, stream.reads_on) for stream in reading]
    for stream, mask in [*wanted, *((stream, stream.writes_on) for stream in writing)]:
        number = stream.socket.fileno()
        if number < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        streams[number] = stream
        masks[number] = masks.get(number, 0) | mask
    for number, mask in masks.items():
        poller.register(number, mask)
    return [streams[number] for number, _ in poller.poll(_milliseconds(seconds))]


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
