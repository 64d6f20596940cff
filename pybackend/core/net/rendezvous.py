"""Listening sockets, addresses and new connections between the processes of one job."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pybackend.core.errors import ClusterError, PeerLostError
from pybackend.core.net.authentication import greet_as_client, greet_as_server
from pybackend.core.net.stream import Stream
from pybackend.core.words import show

_RETRY_SECONDS = 0.05

# Below the ports for outgoing connections, from 32768 on, and above those of most services.
_FIRST_PORT, _PORTS = 20_000, 12_000
# The system answers even for a busy process: without an answer in this time, the network is the
# cause. Up to three packets may be lost.
REACH_SECONDS = 10.0
# Errors of a rejecting firewall, a missing route or a missing host.
_NETWORK_ERRORS = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
_NETWORK_ERRORS |= {errno.EACCES, errno.EPERM}
_AT_ONCE = 64


def listen(host: str, port: int = 0) -> socket.socket:
    """Bind a listening TCP socket on one address; port 0: the system picks one.

    Raises `ClusterError` if ``host`` is not an address of this machine, or the port is in use.
    """
    # A given port may have been used just before: old connections must not block it.
    return _bind(host, port, "listen on", reuses=port != 0, waiting=64)


def reserve(host: str) -> socket.socket:
    """Reserve a port for a server that another process starts.

    The socket is bound with SO_REUSEADDR, but does not listen: the system does not assign the port
    to other processes, but TensorFlow's server, which sets that option (and turns SO_REUSEPORT
    off), can bind it. Raises `ClusterError` if ``host`` is not an address of this machine.
    """
    return _bind(host, 0, "reserve a port on", reuses=True)


def _bind(host: str, port: int, what: str, reuses: bool, waiting: int = 0) -> socket.socket:
    try:
        with contextlib.ExitStack() as on_error:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            made = socket.socket(info[0], socket.SOCK_STREAM)
            on_error.callback(made.close)
            if reuses:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(info[4])
            if waiting:
                made.listen(waiting)
            on_error.pop_all()
            return made
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # that says nothing about the host
            raise
        reason = f"{what} {show(host)}: {error}. It must name an address of this machine"
        if error.errno == errno.EADDRINUSE:
            reason = f"listen on port {port} of {show(host)}: another process uses it. Choose "
            reason += "another port, or end that process"
        raise ClusterError(f"cannot {reason}") from error


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

    Raises `OSError` if no process listens there, or it belongs to another job.
    """
    stream = Stream.connect(split_address(address), seconds)
    try:
        greet_as_client(stream, token, rank, purpose, patience=seconds)
    except OSError:
        stream.close()
        raise
    return stream


def dial(peers: Sequence[str], rank: int, other: int, patience: float = REACH_SECONDS) -> Stream:
    """Connect ``rank`` to ``other`` within `REACH_SECONDS` or ``patience``, whichever is less.

    ``peers`` are ``host:port`` by rank. Raises `ClusterError` if the network blocks the connection,
    and `PeerLostError` if it is refused.
    """
    host, port = split_address(peers[other])
    try:
        return Stream.connect((host, port), min(patience, REACH_SECONDS))
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno in _NETWORK_ERRORS:
            raise ClusterError(
                f"worker {rank} on {split_address(peers[rank])[0]} cannot reach worker {other} at "
                f"{peers[other]} ({error.strerror or error}). {advise_on_network()}"
            ) from error
        reason = f"cannot be reached at {peers[other]} ({error}: it has ended, or a firewall"
        raise PeerLostError(other, host, f"{reason} refuses the connection)") from error


def find_unreachable(peers: Sequence[str], rank: int, others: Iterable[int]) -> str | None:
    """Try to connect to other hosts, at ports where no process needs to listen.

    Returns the message for the first unreachable host; a refused connection counts as reached.
    """

    def attempt(other: int) -> str | None:
        try:
            with contextlib.suppress(PeerLostError):
                dial(peers, rank, other).close()
        except ClusterError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return next(filter(None, pool.map(attempt, others)), None)


def advise_on_network() -> str:
    return (
        "Either a firewall or a missing route separates these two hosts, or the second one is "
        "down. Allow all hosts that run workers to connect to each other over TCP, on the ports "
        f"that their systems pick from{_describe_ports()}; `tfdist doctor --master ...` shows "
        "which hosts can reach each other"
    )


def _describe_ports() -> str:
    """Describe this host's port range for sockets that do not choose a port."""
    with contextlib.suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return f" (net.ipv4.ip_local_port_range, here {low} to {high})"
    return ""


@dataclass(eq=False)
class Acceptor:
    """Accept connections in the background, and pass on those that prove that they know the token.

    Each greeting has its own thread, so that a silent client does not delay others. While
    ``most_greetings`` greetings are in progress, further connections are closed immediately.
    ``encrypt`` is as in `greet_as_client`.
    """

    server: socket.socket
    token: str = field(repr=False)
    purpose: str
    welcome: Callable[[Stream, int], None]
    most_greetings: int = 64
    encrypt: bool | None = None

    def __post_init__(self) -> None:
        self._slots = threading.BoundedSemaphore(self.most_greetings)
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
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()

    def release(self) -> None:
        """Stop accepting here; other users of the socket, even in other processes, can continue."""
        self._closed = True
        # Closing alone does not wake a thread that is blocked in accept().
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self.server, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        with self._woken:
            while not self._closed:
                poller.poll()
                if not self._closed:
                    self._accept_next()

    def _accept_next(self) -> None:
        try:
            stream = Stream.accept(self.server)
        except OSError:  # closed, or the client has disconnected already
            # Also too many open files: without a pause, this thread would take a whole core.
            time.sleep(_RETRY_SECONDS)
            return
        if self._slots.acquire(blocking=False):
            threading.Thread(target=self._greet, args=(stream,), daemon=True).start()
        else:
            stream.close()

    def _greet(self, stream: Stream) -> None:
        try:
            rank = greet_as_server(stream, self.token, self.purpose, self.encrypt)
        except OSError:
            self.rejected += 1
            stream.close()
        else:
            self.welcome(stream, rank)
        finally:
            self._slots.release()
