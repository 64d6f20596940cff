"""Bytes to and from a process in a pod, through the API server."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from typing import IO, Any, cast

# What fits into one message of the API server's, whatever stands between.
_BLOCK = 1 << 15


class Channel:
    """Two files in place of the client's `WSClient`, which only one thread at a time may use.

    Parameters
    ----------
    client
        Of a command that is being executed.

    Attributes
    ----------
    reading, writing
        The command's output and input.
    heard
        When something has come, by the monotonic clock.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._near, self._far = socket.socketpair()
        self.reading: IO[bytes] = self._near.makefile("rb")
        self.writing: IO[bytes] = cast(IO[bytes], self._near.makefile("wb", buffering=0))
        self.heard = time.monotonic()
        self._pump = threading.Thread(target=self._run, daemon=True)
        self._pump.start()

    def close(self) -> None:
        """End the command's input, which ends it."""
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)

    def release(self, seconds: float) -> None:
        """Wait for the end of the connection, and close both files."""
        self._pump.join(seconds)
        for one in (self.reading, self.writing, self._near):
            one.close()

    def _run(self) -> None:
        from websocket import WebSocketException

        with contextlib.suppress(OSError, ValueError, WebSocketException):
            while self._client.is_open() and self._pass_on():
                pass
        with contextlib.suppress(OSError, WebSocketException):
            self._deliver()
            self._client.close(timeout=1)
        # If the other end is gone already, that has not closed the socket.
        self._client.sock.shutdown()
        self._far.close()

    def _pass_on(self) -> bool:
        """Pass on what there is, either way; returns whether the near end is still open."""
        waiting = self._client.sock.sock
        poll = select.poll()
        poll.register(self._far, select.POLLIN)
        poll.register(waiting, select.POLLIN)
        # TLS may have read more than it was asked for.
        has_more = isinstance(waiting, ssl.SSLSocket) and waiting.pending() > 0
        ready = {number for number, _ in poll.poll(0 if has_more else None)}
        if has_more or waiting.fileno() in ready:
            self._deliver()
        if self._far.fileno() in ready:
            block = self._far.recv(_BLOCK)
            if not block:
                return False
            self._client.write_stdin(block)
        return True

    def _deliver(self) -> None:
        self._client.update(timeout=0)
        # Not `read_stdout`: the client would keep a copy of everything.
        if content := self._client.read_all():
            self.heard = time.monotonic()
            self._far.sendall(content)
