"""Base64 text to bytes, strictly."""

from __future__ import annotations

import base64
import binascii

from pybackend.errors import InputError, SerializationError


def decode_base64(text: str) -> bytes:
    """Decode base64 strictly; white space (line breaks of R's encoders) is allowed.

    Raises
    ------
    InputError
        ``text`` is not text.
    SerializationError
        It is not base64.
    """
    if not isinstance(text, str):
        raise InputError(f"expected base64 text, not {type(text).__name__}")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SerializationError(
            f"this is not base64 text ({error}): it was truncated or altered on its way"
        ) from error
