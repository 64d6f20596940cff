"""Secret that processes on several machines share in order to authenticate each other."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from pybackend.core.errors import InputError

VARIABLE = "TFDIST_SECRET"
FILE_VARIABLE = "TFDIST_SECRET_FILE"
_LEAST_CHARACTERS = 16
_ADVICE = (
    "Run `tfdist secret` on one machine and copy the file that it creates to the same path on the "
    f"others, with mode 600; or set {FILE_VARIABLE} to its path, or {VARIABLE} to its contents"
)


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a user's secret, unless an environment variable names another file."""
    configured = environment.get("XDG_CONFIG_HOME")
    return Path(configured or Path.home() / ".config") / "tfdist" / "secret"


def find_secret(is_one_machine: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Return the secret in TFDIST_SECRET, in the file TFDIST_SECRET_FILE, or in the default file.

    Parameters
    ----------
    is_one_machine
        Whether all processes are on this machine: then the default file is created if missing.

    Raises
    ------
    InputError
        There is no secret, or other users can read it.
    """
    given = environment.get(VARIABLE)
    if given:
        return _check(given.strip(), VARIABLE)
    named = environment.get(FILE_VARIABLE)
    path = Path(named) if named else default_path(environment)
    if not path.exists():
        if named:
            raise InputError(f"{FILE_VARIABLE} is set to {named}, which does not exist. {_ADVICE}")
        if not is_one_machine:
            raise InputError(
                "processes on several machines need a shared secret, but none was found (looked "
                f"for {VARIABLE}, {FILE_VARIABLE} and {path}). {_ADVICE}"
            )
        make_secret(path)
    return _read(path)


def make_secret(path: Path) -> bool:
    """Write a random secret to a file that only its owner can read; False if it already exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        written = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            # If several processes do this at once, one wins, and none reads a partial file.
            with contextlib.suppress(FileExistsError):
                os.link(written, path)
                return True
        finally:
            written.unlink()
    except OSError as error:
        raise InputError(f"a secret cannot be written to {path}: {error}. {_ADVICE}") from error
    return False


def derive_token(secret: str, *parts: str) -> str:
    """Derive a token for one purpose; the secret cannot be computed from it (HMAC-SHA256)."""
    message = "|".join(["tfdist", *parts]).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


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
        raise InputError(
            f"the secret in {where} has {len(text)} characters; expected at least "
            f"{_LEAST_CHARACTERS}. `tfdist secret` creates one"
        )
    return text
