"""Sockets between processes of one job: bound first, published then, authenticated before use.

Both ends prove that they know the job's token by answering a fresh challenge (HMAC-SHA256 over
both nonces, as in RFC 2104's keyed hash), so a token never crosses the network and a recorded
exchange is of no use. All messages of the greeting have a fixed length: nothing is parsed, and
nothing else is read, before the proof.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable

from pybackend.errors import ClusterError
from pybackend.net.stream import Stream

_NONCE = 32
_DIGEST = 32
_RANK = struct.Struct(">i")
GREETING_SECONDS = 10.0


def new_token() -> str:
    """A random secret for one job: 256 bits, hexadecimal."""
    return secrets.token_hex(32)


def listen(host: str) -> socket.socket:
    """Bind a listening TCP socket to a port that the system picks on one address.

    Raises
    ------
    ClusterError
        Where ``host`` is no address of this machine.
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
    """``host:port`` of a bound socket, with brackets around IPv6; ``announced``: another host."""
    host, port = server.getsockname()[:2]
    host = announced or host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(peer: str) -> tuple[str, int]:
    """Host and port of ``host:port``; brackets around IPv6 are dropped."""
    host, _, port = peer.rpartition(":")
    return host.strip("[]"), int(port)


def own_address(peer: str) -> str | None:
    """This machine's address on the way to a host, None where there is no way; nothing is sent."""
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
    """Connect, and prove the token both ways; within ``seconds`` for each half.

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


def greet_as_client(
    stream: Stream,
    token: str,
    rank: int,
    purpose: str,
    patience: float = GREETING_SECONDS,
) -> None:
    """Prove the token to the listening end, and have it prove it too.

    ``patience`` is how many seconds the listening end may take to begin: its socket accepts
    connections while its process is still importing TensorFlow.

    Raises
    ------
    OSError
        If the other end closes, is silent, or does not know the token.
    """
    theirs = stream.read_exactly(_NONCE, patience)
    ours = secrets.token_bytes(_NONCE)
    who = _RANK.pack(rank)
    proof = _prove(token, b"client", purpose, theirs, ours, who)
    stream.send_all(ours + who + proof, GREETING_SECONDS)
    answer = stream.read_exactly(_DIGEST, GREETING_SECONDS)
    if not hmac.compare_digest(answer, _prove(token, b"server", purpose, theirs, ours, who)):
        raise ConnectionError("the listening end does not know this job's token")


def greet_as_server(stream: Stream, token: str, purpose: str) -> int:
    """Have a connected client prove the token, and prove it to the client; returns its rank.

    Raises
    ------
    OSError
        If the client closes, is silent, or does not know the token.
    """
    ours = secrets.token_bytes(_NONCE)
    stream.send_all(ours, GREETING_SECONDS)
    message = stream.read_exactly(_NONCE + _RANK.size + _DIGEST, GREETING_SECONDS)
    theirs = message[:_NONCE]
    who = message[_NONCE:-_DIGEST]
    expected = _prove(token, b"client", purpose, ours, theirs, who)
    if not hmac.compare_digest(message[-_DIGEST:], expected):
        raise ConnectionError("a client that does not know this job's token was rejected")
    stream.send_all(_prove(token, b"server", purpose, ours, theirs, who), GREETING_SECONDS)
    rank: int = _RANK.unpack(who)[0]
    return rank


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
            except OSError:
                return
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


def _prove(token: str, side: bytes, purpose: str, *parts: bytes) -> bytes:
    message = b"|".join([b"tfdist", side, purpose.encode()]) + b"".join(parts)
    return hmac.new(token.encode(), message, hashlib.sha256).digest()
