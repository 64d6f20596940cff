"""A relay between the two ends of a connection, which forwards or changes their data."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

Change = Callable[[bytes], bytes]


class Relay:
    """A listening socket that forwards every connection to an address.

    Attributes
    ----------
    address
        ``host:port`` of the relay.
    to_server, to_client
        Functions that replace each piece of data; may be set at any time.
    """

    def __init__(self, stack: ExitStack, target: tuple[str, int]) -> None:
        self.to_server: Change = bytes
        self.to_client: Change = bytes
        self._stack = stack
        self._target = target
        self._server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.place: tuple[str, int] = self._server.getsockname()
        self.address = f"127.0.0.1:{self.place[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._stack.enter_context(self._server.accept()[0])
                server = self._stack.enter_context(socket.create_connection(self._target, 30))
                for source, target, name in (
                    (client, server, "to_server"),
                    (server, client, "to_client"),
                ):
                    pump = (source, target, name)
                    threading.Thread(target=self._pump, args=pump, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, name: str) -> None:
        try:
            while piece := source.recv(1 << 16):
                target.sendall(getattr(self, name)(piece))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            # A reset is forwarded as a reset. When it was swallowed, the other end waited for ever.
            _reset(source)
            _reset(target)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes the other thread
        connection.close()


@contextmanager
def relaying(target: tuple[str, int]) -> Iterator[Relay]:
    """Run a relay to a listening socket; its connections end with it."""
    with ExitStack() as stack:
        relay = Relay(stack, target)
        # Wakes the thread that accepts, before its socket closes.
        stack.callback(relay._server.shutdown, socket.SHUT_RDWR)
        yield relay


def altered(piece: bytes) -> bytes:
    """Return the data with one bit in the middle changed."""
    middle = len(piece) // 2
    return piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
