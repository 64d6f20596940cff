"""Secrets, and the greeting on a new connection, in which both ends prove that they know one.

Each end answers a fresh challenge (HMAC-SHA256 over both nonces, as in RFC 2104's keyed hash), so a
token never crosses the network, and a recorded exchange is useless. All messages in the greeting
have a fixed length: nothing is parsed, and nothing else is read, before the proof.

With its nonce, each end sends a flag that requests encryption. The proofs authenticate the flags,
so encryption cannot be downgraded. If one end requests it, TLS begins after the client's proof, and
the server's proof is the first encrypted message: it binds the connection to this greeting.

A job that one driver starts has a random token. Processes that users start themselves derive it
from a secret, which users copy to all of the machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from pybackend.core.errors import InputError
from pybackend.core.net.stream import Stream

VARIABLE = "TFDIST_SECRET"
FILE_VARIABLE = "TFDIST_SECRET_FILE"
_LEAST_CHARACTERS = 16
_ADVICE = (
    "Run `tfdist secret` on one machine and copy the file that it creates to the same path on the "
    f"others, with mode 600; or set {FILE_VARIABLE} to its path, or {VARIABLE} to its contents"
)

GREETING_SECONDS = 10.0
_NONCE = 32
_DIGEST = 32
_RANK = struct.Struct(">i")
_FLAG = 1


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

    The listening end must respond within ``patience`` seconds: its socket accepts connections while
    its process is still importing TensorFlow. ``encrypt`` is whether this end requests
    encryption; None: only between machines. Raises `RejectedError` if the other end does not know
    the token, and another `OSError` if it closes the connection too early, or is silent.
    """
    theirs = stream.read_exactly(_NONCE + _FLAG, patience)
    ours = secrets.token_bytes(_NONCE) + _RANK.pack(rank) + _make_flag(stream, encrypt)
    proof = _prove(token, b"client", purpose, theirs, ours)
    stream.send_all(ours + proof, GREETING_SECONDS)
    try:
        _protect_if_wanted(stream, token, theirs, ours, is_server=False)
        answer = stream.read_exactly(_DIGEST, GREETING_SECONDS)
    except ConnectionError as error:
        raise RejectedError("the listening end closed the connection after the proof") from error
    # In constant time, here and below: the time of == tells how many bytes of a guess are right.
    if not hmac.compare_digest(answer, _prove(token, b"server", purpose, theirs, ours)):
        raise RejectedError("the listening end does not know this job's token")


def greet_as_server(stream: Stream, token: str, purpose: str, encrypt: bool | None = None) -> int:
    """Check a client's proof, prove knowledge of the token to it, and return its rank.

    It is enough if one end requests encryption. Raises `OSError` if the client closes the
    connection, is silent, or does not know the token.
    """
    ours = secrets.token_bytes(_NONCE) + _make_flag(stream, encrypt)
    stream.send_all(ours, GREETING_SECONDS)
    message = stream.read_exactly(_NONCE + _RANK.size + _FLAG + _DIGEST, GREETING_SECONDS)
    theirs, proof = message[:-_DIGEST], message[-_DIGEST:]
    if not hmac.compare_digest(proof, _prove(token, b"client", purpose, ours, theirs)):
        raise ConnectionError("a client that does not know this job's token was rejected")
    _protect_if_wanted(stream, token, ours, theirs, is_server=True)
    stream.send_all(_prove(token, b"server", purpose, ours, theirs), GREETING_SECONDS)
    rank: int = _RANK.unpack(theirs[_NONCE:-_FLAG])[0]
    return rank


def _make_flag(stream: Stream, encrypt: bool | None) -> bytes:
    return bytes([not stream.is_within_one_machine if encrypt is None else encrypt])


def _protect_if_wanted(stream: Stream, token: str, *flags: bytes, is_server: bool) -> None:
    if any(flag[-1] for flag in flags):
        from pybackend.core.net.tls import Tls  # connections on the loopback need no TLS

        stream.protect(Tls(token, is_server), GREETING_SECONDS)


def _prove(token: str, side: bytes, purpose: str, *parts: bytes) -> bytes:
    # The side is part of the proof: otherwise an end without the token could send back the other
    # end's own proof.
    message = b"|".join([b"tfdist", side, purpose.encode()]) + b"".join(parts)
    return hmac.new(token.encode(), message, hashlib.sha256).digest()


def new_token() -> str:
    """Create a random secret for one job: 256 bits, hexadecimal."""
    return secrets.token_hex(32)


def derive_token(secret: str, *parts: str) -> str:
    """Derive a token for one purpose; the secret cannot be computed from it (HMAC-SHA256)."""
    message = "|".join(["tfdist", *parts]).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a user's secret, unless an environment variable names another file."""
    configured = environment.get("XDG_CONFIG_HOME")
    return Path(configured or Path.home() / ".config") / "tfdist" / "secret"


def find_secret(is_one_machine: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Return the secret in TFDIST_SECRET, in the file TFDIST_SECRET_FILE, or in the default file.

    If all processes are on this machine, a missing default file is created. Raises `InputError` if
    there is no secret, or other users can read it.
    """
    if given := environment.get(VARIABLE):
        return _check(given.strip(), VARIABLE)
    named = environment.get(FILE_VARIABLE)
    path = Path(named) if named else default_path(environment)
    if not path.exists():
        if named:
            raise InputError(f"{FILE_VARIABLE} is set to {named}, which does not exist. {_ADVICE}")
        if not is_one_machine:
            reason = "processes on several machines need a shared secret, but none was found"
            looked = f"looked for {VARIABLE}, {FILE_VARIABLE} and {path}"
            raise InputError(f"{reason} ({looked}). {_ADVICE}")
        make_secret(path)
    return _read(path)


def make_secret(path: Path) -> bool:
    """Write a random secret to a file that only its owner can read; False if it already exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Its mode is 0600.
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as written:
            written.write(new_token() + "\n")
            written.flush()
            # If several processes do this at once, one wins, and none reads a partial file.
            with contextlib.suppress(FileExistsError):
                os.link(written.name, path)
                return True
    except OSError as error:
        raise InputError(f"a secret cannot be written to {path}: {error}. {_ADVICE}") from error
    return False


def _read(path: Path) -> str:
    try:
        shared = stat.S_IMODE(path.stat().st_mode) & 0o077
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the secret in {path} cannot be read: {error}") from error
    if shared:
        raise InputError(f"other users can read the secret in {path}: run chmod 600 {path}")
    return _check(text, str(path))


def _check(text: str, where: str) -> str:
    if len(text) < _LEAST_CHARACTERS:
        reason = f"has {len(text)} characters; expected at least {_LEAST_CHARACTERS}"
        raise InputError(f"the secret in {where} {reason}. `tfdist secret` creates one")
    return text
