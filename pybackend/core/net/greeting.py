"""Greeting on a new connection: both ends prove that they know the job's token.

Each answers a fresh challenge (HMAC-SHA256 over both nonces, as in RFC 2104's keyed hash), so a
token never crosses the network, and a recorded exchange is useless. All messages in the greeting
have a fixed length: nothing is parsed, and nothing else is read, before the proof.

With its nonce, each end sends a flag that requests encryption. The proofs authenticate the flags,
so encryption cannot be downgraded. If one end requests it, TLS begins after the client's proof, and
the server's proof is the first encrypted message: it binds the connection to this greeting.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from pybackend.core.net.stream import Stream

_NONCE = 32
_DIGEST = 32
_RANK = struct.Struct(">i")
_WISH = 1
GREETING_SECONDS = 10.0


class RejectedError(ConnectionError):
    """The listening end did not accept the proof: it has a different token."""


def greet_as_client(
    stream: Stream,
    token: str,
    rank: int,
    purpose: str,
    patience: float = GREETING_SECONDS,
    encrypt: bool | None = None,
) -> None:
    """Prove knowledge of the token to the listening end, and check its proof.

    Parameters
    ----------
    patience
        Seconds within which the listening end must respond: its socket accepts connections while
        its process is still importing TensorFlow.
    encrypt
        Whether this end requests encryption. None: only between machines.

    Raises
    ------
    RejectedError
        The other end does not know the token.
    OSError
        The other end closes the connection too early, or is silent.
    """
    theirs = stream.read_exactly(_NONCE + _WISH, patience)
    ours = secrets.token_bytes(_NONCE) + _RANK.pack(rank) + _wish(stream, encrypt)
    proof = _prove(token, b"client", purpose, theirs, ours)
    stream.send_all(ours + proof, GREETING_SECONDS)
    try:
        _protect_if_wanted(stream, token, theirs, ours, is_server=False)
        answer = stream.read_exactly(_DIGEST, GREETING_SECONDS)
    except ConnectionError as error:
        raise RejectedError("the listening end closed the connection after the proof") from error
    if not hmac.compare_digest(answer, _prove(token, b"server", purpose, theirs, ours)):
        raise RejectedError("the listening end does not know this job's token")


def greet_as_server(stream: Stream, token: str, purpose: str, encrypt: bool | None = None) -> int:
    """Check a client's proof, prove knowledge of the token to it, and return its rank.

    ``encrypt`` is as in `greet_as_client`: it is enough if one end requests encryption.

    Raises
    ------
    OSError
        The client closes the connection, is silent, or does not know the token.
    """
    ours = secrets.token_bytes(_NONCE) + _wish(stream, encrypt)
    stream.send_all(ours, GREETING_SECONDS)
    message = stream.read_exactly(_NONCE + _RANK.size + _WISH + _DIGEST, GREETING_SECONDS)
    theirs, proof = message[:-_DIGEST], message[-_DIGEST:]
    if not hmac.compare_digest(proof, _prove(token, b"client", purpose, ours, theirs)):
        raise ConnectionError("a client that does not know this job's token was rejected")
    _protect_if_wanted(stream, token, ours, theirs, is_server=True)
    stream.send_all(_prove(token, b"server", purpose, ours, theirs), GREETING_SECONDS)
    rank: int = _RANK.unpack(theirs[_NONCE:-_WISH])[0]
    return rank


def _wish(stream: Stream, encrypt: bool | None) -> bytes:
    return bytes([not stream.is_within_one_machine if encrypt is None else encrypt])


def _protect_if_wanted(stream: Stream, token: str, *flags: bytes, is_server: bool) -> None:
    if any(flag[-1] for flag in flags):
        from pybackend.core.net.tls import Tls  # connections on the loopback need no TLS

        stream.protect(Tls(token, is_server), GREETING_SECONDS)


def _prove(token: str, side: bytes, purpose: str, *parts: bytes) -> bytes:
    message = b"|".join([b"tfdist", side, purpose.encode()]) + b"".join(parts)
    return hmac.new(token.encode(), message, hashlib.sha256).digest()
