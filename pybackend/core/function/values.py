"""Encode a function's value: the types in `pybackend.core.job.value_codec`, and Keras models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pybackend.core.errors import SerializationError
from pybackend.core.job import value_codec
from pybackend.core.job.value_codec import KINDS
from pybackend.core.job.value_kinds import ValueKind, exactly, is_of
from pybackend.core.model.serialization import model_from_bytes, model_to_bytes


@dataclass(frozen=True)
class Unreturned:
    """Placeholder for a value that cannot be sent or rebuilt, so that the others can."""

    reason: str


def encode_result(value: Any) -> str:
    """Return the JSON text of a value, or of `Unreturned` if its type cannot be sent."""
    try:
        return value_codec.encode_value(value, _KINDS)
    except SerializationError as error:
        return value_codec.encode_value(Unreturned(str(error)), _KINDS)


def decode_result(text: str) -> Any:
    """Return the value that `encode_result` wrote, without running any code in a model.

    Returns `Unreturned` if the value could not be sent, if the text is damaged, or if a model needs
    classes that Keras does not know here.
    """
    try:
        return value_codec.decode_value(text, _KINDS)
    except SerializationError as error:
        return Unreturned(str(error))


_KINDS = (
    exactly(Unreturned, lambda value: [value.reason], lambda reason: Unreturned(str(reason))),
    ValueKind(
        "model",
        is_of("keras", "Model", or_derived=True),
        lambda model: [model_to_bytes(model, format="keras", include_optimizer=True)],
        lambda content: model_from_bytes(content, safe_mode=True),
    ),
    *KINDS,
)
