"""The greeting on a new connection: both ends prove that they know the job's token.

Each answers a fresh challenge (HMAC-SHA256 over both nonces, as in RFC 2104's keyed hash), so a
token never crosses the network and a recorded exchange is of no use. All messages of the greeting
have a fixed length: nothing is parsed, and nothing else is read, before the proof.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from pybackend.net.stream import Stream

_NONCE = 32
_DIGEST = 32
_RANK = struct.Struct(">i")
GREETING_SECONDS = 10.0


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


def _prove(token: str, side: bytes, purpose: str, *parts: bytes) -> bytes:
    message = b"|".join([b"tfdist", side, purpose.encode()]) + b"".join(parts)
    return hmac.new(token.encode(), message, hashlib.sha256).digest()
