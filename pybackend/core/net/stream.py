"""Connections between processes over TCP sockets.

A connection may be protected by TLS from some point on (`tls`). TLS handles whole
records, and may hold bytes that the system no longer reports as readable. So a stream stores the
bytes that it has read ahead or not sent yet, and waits outside TLS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from pybackend.core.machine import is_loopback

_BLOCK = 1 << 16
# Bytes received at once from a protected connection: several records.
_SEALED_BLOCK = 1 << 18
# How long a connection with altered data stays open, so that the other end is informed.
_FAREWELL_SECONDS = 1.0


class StreamEndError(ConnectionError):
    """The other end has closed the connection, and all of its data has been read."""


class AlteredError(ConnectionError):
    """The received data is not what the other end sent."""


class LineStream(Protocol):
    """Connection for lines, some of which announce bytes; the methods are those of `Stream`."""

    @property
    def heard(self) -> float:
        """Time of the last received bytes, as in `time.monotonic`."""

    def read_line(self, limit: int, seconds: float | None = None) -> bytes: ...
    def read_exactly(self, size: int, seconds: float | None = None) -> bytes: ...
    def send_all(self, content: bytes, seconds: float | None = None) -> None: ...
    def keep_alive(self) -> None:
        """Make sure that the loss of the other end is noticed."""

    def close(self) -> None:
        """Close the connection, and wake a thread that is waiting for it."""


class Cipher(Protocol):
    """TLS on the bytes of a connection; `tls.Tls`, which most processes never import."""

    def shake_hands(self) -> bool: ...
    def seal(self, buffers: list[memoryview]) -> int: ...
    def take(self) -> bytes: ...
    def put(self, content: memoryview) -> None: ...
    def open(self, buffers: list[memoryview]) -> int: ...
    def has_pending(self) -> bool: ...


class Stream:
    """One connection, used in both directions: one thread may read while another one writes.

    The socket never blocks. A method with a limit in seconds tries, waits until the socket is
    ready, and tries again; None waits without a limit. All methods raise `OSError` if the
    connection fails, or `TimeoutError` (a subclass) if the time limit has passed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.heard = time.monotonic()
        """Time of the last received bytes."""
        self._ahead = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._tls: Cipher | None = None
        self._sealed = 0
        self._unsent = memoryview(b"")
        self._block = memoryview(b"")

    @classmethod
    def connect(cls, address: tuple[str, int], seconds: float) -> Stream:
        return cls(socket.create_connection(address, seconds))

    @classmethod
    def accept(cls, server: socket.socket) -> Stream:
        return cls(server.accept()[0])

    @property
    def is_within_one_machine(self) -> bool:
        """True if both ends are on this machine, so that no data leaves it."""
        own, other = self.socket.getsockname()[0], self.socket.getpeername()[0]
        return bool(own == other or is_loopback(other))

    @property
    def is_protected(self) -> bool:
        """True once `protect` has been called."""
        return self._tls is not None

    def protect(self, tls: Cipher, seconds: float) -> None:
        """Encrypt all further data. Both ends must call it at the same point.

        Raises `OSError` if the other end does not know the token of ``tls``, closes the connection,
        or is silent.
        """
        deadline = _deadline(seconds)
        block = memoryview(bytearray(_SEALED_BLOCK))
        has_agreed = False
        while not has_agreed:
            try:
                has_agreed = tls.shake_hands()
            finally:  # it tells the other end of an error, too
                self.send_all(tls.take(), _remaining(deadline))
            if not has_agreed:
                tls.put(block[: self._receive_in_time(block, deadline)])
        self._tls, self._block = tls, block

    def send_some(self, buffers: list[memoryview]) -> int:
        """Send the beginning of some buffers; return the number of bytes sent, possibly 0.

        After 0, the next call must begin with the same bytes: some may have been sent already.
        """
        try:
            if self._tls:
                return self._send_sealed(self._tls, buffers)
            if len(buffers) == 1:
                return self.socket.send(buffers[0])
            return self.socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def receive_some(self, buffers: list[memoryview]) -> int:
        """Fill buffers, none of them empty, in order; return the number of bytes received.

        Raises `StreamEndError` if the other end has closed the connection.
        """
        return self._take_ahead(buffers[0]) if self._ahead else self._receive(buffers)

    def send_all(self, content: bytes, seconds: float | None = None) -> None:
        deadline = _deadline(seconds)
        rest = memoryview(content)
        while rest:
            sent = self.send_some([rest])
            rest = rest[sent:]
            if not sent and not wait_any([], [self], _remaining(deadline)):
                raise TimeoutError(f"the other end has not read anything for {seconds:g} s")

    def read_exactly(self, size: int, seconds: float | None = None) -> bytes:
        """Read exactly ``size`` bytes. If the stream ends earlier, raise `StreamEndError`."""
        deadline = _deadline(seconds)
        content = bytearray(size)
        rest = memoryview(content)
        while rest:
            count = self._take_ahead(rest) or self._receive_in_time(rest, deadline)
            rest = rest[count:]
        return bytes(content)

    def read_line(self, limit: int, seconds: float | None = None) -> bytes:
        r"""Return the next line with its ``\n``; ``b""`` at the end, even after a partial line.

        Raises `ValueError` if it has more than ``limit`` bytes.
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
        """Return the next bytes, up to ``size``, without consuming them.

        None if nothing was received in time; ``b""`` at the end or after a reset.
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
        except AlteredError:
            raise
        except ConnectionError:
            has_ended = True
        seen = bytes(self._ahead[:size])
        return seen if seen or has_ended else None

    def has_pending(self) -> bool:
        """Return whether bytes were received that the system no longer reports as readable."""
        return bool(self._ahead) or (self._tls is not None and self._tls.has_pending())

    def wait_readable(self, seconds: float | None) -> bool:
        """Wait, and return whether there is anything to read, or the connection has ended."""
        return self.has_pending() or self._wait(seconds)

    def set_buffers(self, sending: int, receiving: int) -> None:
        """Set the sizes of the system's buffers, in bytes."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sending)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receiving)

    def keep_alive(self) -> None:
        """Make the system notice the loss of the other machine within half a minute."""
        # Keepalive pauses while sent bytes are unacknowledged; the last option does not. In
        # milliseconds.
        times = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
        self._set_keepalive(**times, TCP_USER_TIMEOUT=30_000)

    def probe(self, seconds: float) -> None:
        """Make the system send keepalive probes while the connection is idle.

        The system closes the connection if there is no answer for about ``seconds``. Unlike
        `keep_alive`, it tolerates a process that does not read.
        """
        pause = max(1, min(10, int(seconds / 4)))
        count = max(1, min(127, int(seconds / pause) - 1))  # 127: Linux's limit
        self._set_keepalive(TCP_KEEPIDLE=pause, TCP_KEEPINTVL=pause, TCP_KEEPCNT=count)

    def _set_keepalive(self, **options: int) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # macOS has other names for them
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def is_unanswered(self, seconds: float) -> bool:
        """Return whether the other machine has not answered packets for ``seconds``.

        The system answers even for a process that is busy or stopped. Systems other than Linux do
        not report this, so there the result is always True.
        """
        if sys.platform != "linux":
            return True
        try:
            # Fields of <linux/tcp.h>, whose beginning never changes: tcpi_retransmits,
            # tcpi_probes, and tcpi_last_ack_recv in milliseconds.
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        except OSError:
            return True
        (last_answer,) = struct.unpack_from("=I", info, 56)
        return bool(info[2] or info[3]) and last_answer >= 1000 * seconds

    def close(self) -> None:
        """Close the connection, and wake a thread that is waiting for it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # closing alone wakes no thread
        self.socket.close()

    def _send_sealed(self, tls: Cipher, buffers: list[memoryview]) -> int:
        """Send a few records; return their number of bytes once all of them were sent, else 0."""
        if not self._unsent:
            self._sealed = tls.seal(buffers)
            self._unsent = memoryview(tls.take())
        self._unsent = self._unsent[self.socket.send(self._unsent) :]
        return 0 if self._unsent else self._sealed

    def _receive(self, buffers: list[memoryview]) -> int:
        if self._tls is None:
            return self._receive_plain(buffers)
        try:
            # A useless call of OpenSSL costs more than one of the system.
            count = self._tls.open(buffers) if self._tls.has_pending() else 0
            if not count and (arrived := self._receive_plain([self._block])):
                self._tls.put(self._block[:arrived])
                count = self._tls.open(buffers)
        except AlteredError:
            if alert := self._tls.take():  # this end noticed it, not the other one
                self._report_alteration(alert)
            raise
        return count

    def _report_alteration(self, alert: bytes) -> None:
        """Send the other end TLS's alert, and read until it closes the connection.

        A socket that is closed with unread data resets the connection, and the reset discards what
        the other end has not read yet. So the alert was lost: the other rank reported a closed
        connection, and did not know that data had been altered.
        """
        # A record that was begun is completed, because TLS reads nothing after a partial one.
        pending = memoryview(bytes(self._unsent) + alert)
        self._unsent = memoryview(b"")
        deadline = time.monotonic() + _FAREWELL_SECONDS
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                if pending:
                    with contextlib.suppress(BlockingIOError):
                        pending = pending[self.socket.send(pending) :]
                    if not pending:
                        self.socket.shutdown(socket.SHUT_WR)
                if self._wait(0.05) and not self.socket.recv(_BLOCK):
                    break

    def _receive_plain(self, buffers: list[memoryview]) -> int:
        try:
            if len(buffers) == 1:
                count = self.socket.recv_into(buffers[0])
            else:
                count = self.socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return 0
        if count == 0:
            raise StreamEndError("the other end has closed the connection")
        self.heard = time.monotonic()
        return count

    def _receive_in_time(self, buffer: memoryview, deadline: float | None) -> int:
        """Receive at least one byte beyond those that were read ahead."""
        while not (count := self._receive([buffer])):
            if not self._wait(_remaining(deadline)):
                raise TimeoutError("the peer sent no data before the timeout")
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

    Returns the ready or failed ones; none if the time limit passes first.
    """
    # TLS may hold bytes that no poll reports: waiting for them would never end.
    pending = [stream for stream in reading if stream.has_pending()]
    if pending:
        return pending
    # poll, not select: select cannot take descriptors above 1023.
    poller = select.poll()
    masks: dict[int, int] = {}
    streams: dict[int, Stream] = {}
    wanted = [(stream, select.POLLIN) for stream in reading]
    for stream, mask in [*wanted, *((stream, select.POLLOUT) for stream in writing)]:
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
