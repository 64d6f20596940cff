"""What a function may return: `pybackend.job.values`, and Keras models."""

from __future__ import annotations

import base64
from typing import Any

from pybackend.job import values
from pybackend.job.value_kind import Fields, Kind, Pack, Unpack, is_of, to_text
from pybackend.job.value_kinds import KINDS
from pybackend.model.serialization import model_from_bytes, model_to_bytes


def encode_result(value: Any) -> str:
    """JSON text of a value. Errors are those of `encode_value`."""
    return values.encode_value(value, _KINDS)


def decode_result(text: str) -> Any:
    """The value that `encode_result` wrote; a model is built without running code it may carry.

    Raises
    ------
    SerializationError
        The text is damaged, or a model needs classes that Keras does not know here.
    """
    return values.decode_value(text, _KINDS)


def _pack_model(model: Any, _: Pack) -> Fields:
    return {"data": to_text(model_to_bytes(model, format="keras", include_optimizer=True))}


def _unpack_model(fields: Fields, _: Unpack) -> Any:
    return model_from_bytes(base64.b64decode(fields["data"]), safe_mode=True)


_KINDS = (
    Kind("model", is_of("keras", "Model", or_derived=True), _pack_model, _unpack_model),
    *KINDS,
)
