"""The SHA-256 that a model file carries behind its content, so that damage to it is noticed.

Other readers take the file as it is: HDF5 passes over what lies behind the end that its first
block names, and a zip archive may end with a comment.
"""

from __future__ import annotations

import hashlib

from pybackend.errors import SerializationError

_MARK = b"\ntfdist sha256 "
_LENGTH = len(_MARK) + 64
_ZIP_MAGIC = b"PK\x03\x04"


def append_digest(data: bytes) -> bytes:
    """A model file with its digest; an archive must have no comment yet."""
    if data.startswith(_ZIP_MAGIC):
        # The last field of an archive is the length of its comment.
        data = data[:-2] + _LENGTH.to_bytes(2, "little")
    return data + _MARK + _digest(data)


def carries_digest(data: bytes) -> bool:
    """Whether a model file carries a digest, or what is left of one."""
    return _find_mark(data) >= 0


def check_carried_digest(data: bytes) -> None:
    """Reject a model file that carries a digest of another content.

    Raises
    ------
    SerializationError
        The file was altered or damaged.
    """
    begin = _find_mark(data)
    if begin >= 0 and data[begin:] != _MARK + _digest(data[:begin]):
        raise SerializationError(
            "the model file was altered or damaged: its content does not have the SHA-256 that it "
            "carries. Copy or save it again"
        )


def _find_mark(data: bytes) -> int:
    return data.rfind(_MARK, max(0, len(data) - _LENGTH))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
