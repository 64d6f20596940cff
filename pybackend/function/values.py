"""Encode a function's value: the types in `pybackend.job.values`, and Keras models."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from pybackend.errors import SerializationError
from pybackend.job import values
from pybackend.job.value_kind import Fields, Pack, Unpack, ValueKind, is_of, to_text
from pybackend.job.value_kinds import KINDS
from pybackend.model.serialization import model_from_bytes, model_to_bytes


@dataclass(frozen=True)
class Unreturned:
    """Placeholder for a value that cannot be sent or rebuilt, so that the others can."""

    reason: str


def encode_result(value: Any) -> str:
    """Return the JSON text of a value, or of `Unreturned` if its type cannot be sent."""
    try:
        return values.encode_value(value, _KINDS)
    except SerializationError as error:
        return values.encode_value(Unreturned(str(error)), _KINDS)


def decode_result(text: str) -> Any:
    """Return the value that `encode_result` wrote, without running any code in a model.

    Returns `Unreturned` if the value could not be sent, if the text is damaged, or if a model needs
    classes that Keras does not know here.
    """
    try:
        return values.decode_value(text, _KINDS)
    except SerializationError as error:
        return Unreturned(str(error))


def _pack_model(model: Any, _: Pack) -> Fields:
    return {"data": to_text(model_to_bytes(model, format="keras", include_optimizer=True))}


def _unpack_model(fields: Fields, _: Unpack) -> Any:
    return model_from_bytes(base64.b64decode(fields["data"]), safe_mode=True)


_KINDS = (
    ValueKind(
        "unreturned",
        lambda value: isinstance(value, Unreturned),
        lambda value, _: {"reason": value.reason},
        lambda fields, _: Unreturned(str(fields["reason"])),
    ),
    ValueKind("model", is_of("keras", "Model", or_derived=True), _pack_model, _unpack_model),
    *KINDS,
)
