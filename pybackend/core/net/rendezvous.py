"""Listening sockets, addresses and new connections between the processes of one job."""

from __future__ import annotations

import contextlib
import errno
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from pybackend.core.errors import ClusterError
from pybackend.core.net.greeting import greet_as_client, greet_as_server
from pybackend.core.net.stream import Stream
from pybackend.core.words import show

_RETRY_SECONDS = 0.05

# Below the ports for outgoing connections, from 32768 on, and above those of most services.
_FIRST_PORT, _PORTS = 20_000, 12_000


def new_token() -> str:
    """Create a random secret for one job: 256 bits, hexadecimal."""
    return secrets.token_hex(32)


def listen(host: str, port: int = 0) -> socket.socket:
    """Bind a listening TCP socket on one address, to a port that the system picks if none is given.

    Raises
    ------
    ClusterError
        ``host`` is not an address of this machine, or the port is in use.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            if port:  # it may have been used just before: old connections must not block it
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(info[4])
            server.listen(64)
        except OSError:
            server.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"cannot listen on port {port} of {show(host)}: another process uses it. Choose "
                "another port, or end that process"
            ) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise ClusterError(
            f"cannot listen on {show(host)}: {error}. It must name an address of this machine"
        ) from error
    return server


def reserve(host: str) -> socket.socket:
    """Reserve a port for a server that another process starts.

    The socket is bound with SO_REUSEADDR, but does not listen: the system does not assign the port
    to other processes, but TensorFlow's server, which sets that option (and turns SO_REUSEPORT
    off), can bind it.

    Raises
    ------
    ClusterError
        ``host`` is not an address of this machine.
    """
    try:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        held = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(info[4])
        except OSError:
            held.close()
            raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise ClusterError(
            f"cannot reserve a port on {show(host)}: {error}. It must name an address of this "
            "machine"
        ) from error
    return held


def address_of(server: socket.socket, announced: str | None = None) -> str:
    """Return ``host:port`` of a bound socket, with brackets around an IPv6 address.

    ``announced`` replaces the host.
    """
    host, port = server.getsockname()[:2]
    host = announced or host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(peer: str) -> tuple[str, int]:
    """Split ``host:port``, and remove brackets around an IPv6 address."""
    host, _, port = peer.rpartition(":")
    return host.strip("[]"), int(port)


def pick_port(number: int) -> int:
    """Return the port for the group with this number, the same in all of its processes."""
    return _FIRST_PORT + number % _PORTS


def connect(address: str, token: str, rank: int, purpose: str, seconds: float) -> Stream:
    """Connect, and exchange proofs of knowing the token, each within ``seconds``.

    Raises
    ------
    OSError
        No process listens there, or it belongs to another job.
    """
    stream = Stream.connect(split_address(address), seconds)
    try:
        greet_as_client(stream, token, rank, purpose, patience=seconds)
    except OSError:
        stream.close()
        raise
    return stream


class Acceptor:
    """Accept connections in the background, and pass on those that prove that they know the token.

    Each greeting has its own thread, so that a silent client does not delay others. While
    ``most_greetings`` greetings are in progress, further connections are closed immediately.
    ``encrypt`` is as in `greet_as_client`.
    """

    def __init__(
        self,
        server: socket.socket,
        token: str,
        purpose: str,
        welcome: Callable[[Stream, int], None],
        most_greetings: int = 64,
        encrypt: bool | None = None,
    ) -> None:
        self._server = server
        self._token = token
        self._purpose = purpose
        self._encrypt = encrypt
        self._welcome = welcome
        self._slots = threading.BoundedSemaphore(most_greetings)
        self._closed = False
        self.rejected = 0
        """Number of connections that did not prove the token."""
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="tfdist-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections that were passed on stay open."""
        self.release()
        with contextlib.suppress(OSError):  # some systems shut connections down, not listeners
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def release(self) -> None:
        """Stop accepting here; other users of the socket, even in other processes, can continue."""
        self._closed = True
        # Closing alone does not wake a thread that is blocked in accept().
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._server, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        with self._woken:
            while not self._closed:
                poller.poll()
                if not self._closed:
                    self._accept_next()

    def _accept_next(self) -> None:
        try:
            stream = Stream.accept(self._server)
        except OSError:  # closed, or the client has disconnected already
            time.sleep(_RETRY_SECONDS)
            return
        if self._slots.acquire(blocking=False):
            threading.Thread(target=self._greet, args=(stream,), daemon=True).start()
        else:
            stream.close()

    def _greet(self, stream: Stream) -> None:
        try:
            rank = greet_as_server(stream, self._token, self._purpose, self._encrypt)
        except OSError:
            self.rejected += 1
            stream.close()
        else:
            self._welcome(stream, rank)
        finally:
            self._slots.release()
