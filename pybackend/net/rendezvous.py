"""Where processes of one job find each other: listening sockets, addresses, new connections."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable

from pybackend.errors import ClusterError
from pybackend.net.greeting import greet_as_client, greet_as_server
from pybackend.net.stream import Stream

_RETRY_SECONDS = 0.05


def new_token() -> str:
    """Make a random secret for one job: 256 bits, hexadecimal."""
    return secrets.token_hex(32)


def listen(host: str) -> socket.socket:
    """Bind a listening TCP socket to a port that the system picks on one address.

    Raises
    ------
    ClusterError
        If ``host`` is not an address of this machine.
    """
    try:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        server = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            server.bind(info[4])
            server.listen(64)
        except OSError:
            server.close()
            raise
    except OSError as error:
        raise ClusterError(
            f"cannot listen on {host!r}: {error}. It must name an address of this machine"
        ) from error
    return server


def address_of(server: socket.socket, announced: str | None = None) -> str:
    """``host:port`` of a bound socket, brackets around IPv6; ``announced`` replaces the host."""
    host, port = server.getsockname()[:2]
    host = announced or host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(peer: str) -> tuple[str, int]:
    """Split ``host:port``, and drop brackets around IPv6."""
    host, _, port = peer.rpartition(":")
    return host.strip("[]"), int(port)


def own_address(peer: str) -> str | None:
    """This machine's address on the route to a host, None without a route; nothing is sent."""
    try:
        # Any port will do: connecting a datagram socket only looks up the route.
        infos = socket.getaddrinfo(peer.strip("[]"), 9, type=socket.SOCK_DGRAM)
        family, _, _, _, address = infos[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def connect(address: str, token: str, rank: int, purpose: str, seconds: float) -> Stream:
    """Connect and exchange proofs of the token, each within ``seconds``.

    Raises
    ------
    OSError
        If nobody listens there, or not for this job.
    """
    stream = Stream.connect(split_address(address), seconds)
    try:
        greet_as_client(stream, token, rank, purpose, patience=seconds)
    except OSError:
        stream.close()
        raise
    return stream


class Acceptor:
    """Accepts connections in the background and passes on those that prove the token.

    Each greeting has its own thread, so that a silent stranger delays nobody; while
    ``most_greetings`` are under way, further connections are closed at once.
    """

    def __init__(
        self,
        server: socket.socket,
        token: str,
        purpose: str,
        welcome: Callable[[Stream, int], None],
        most_greetings: int = 64,
    ) -> None:
        self._server = server
        self._token = token
        self._purpose = purpose
        self._welcome = welcome
        self._slots = threading.BoundedSemaphore(most_greetings)
        self._closed = False
        threading.Thread(target=self._accept, name="tfdist-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening; connections passed on stay open."""
        self._closed = True
        # Closing alone does not wake a thread that is blocked in accept().
        with contextlib.suppress(OSError):  # some systems shut connections down, not listeners
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream = Stream.accept(self._server)
            except OSError:  # closed, or a stranger that has left already
                time.sleep(_RETRY_SECONDS)
                continue
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(stream,), daemon=True).start()
            else:
                stream.close()

    def _greet(self, stream: Stream) -> None:
        try:
            rank = greet_as_server(stream, self._token, self._purpose)
        except OSError:
            stream.close()
        else:
            self._welcome(stream, rank)
        finally:
            self._slots.release()
