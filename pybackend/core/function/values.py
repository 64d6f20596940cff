"""Rows that a function gets, in a folder filled beforehand, and the value that it returns.

A value may have the types in `pybackend.core.job.value_codec`, or be a Keras model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.core.data.rows import StoredRows
from pybackend.core.errors import SerializationError
from pybackend.core.job.arguments import check_whole_number
from pybackend.core.job.value_codec import KINDS, decode_value, encode_value
from pybackend.core.job.value_kinds import ValueKind, exactly, is_of
from pybackend.core.model.serialization import model_from_bytes, model_to_bytes


@dataclass(frozen=True)
class Unreturned:
    """Placeholder for a value that cannot be sent or rebuilt, so that the others can."""

    reason: str


def encode_result(value: Any) -> str:
    """Return the JSON text of a value, or of `Unreturned` if its type cannot be sent."""
    try:
        return encode_value(value, _KINDS)
    except SerializationError as error:
        return encode_value(Unreturned(str(error)), _KINDS)


def decode_result(text: str) -> Any:
    """Return the value that `encode_result` wrote, without running any code in a model.

    Returns `Unreturned` if the value could not be sent, if the text is damaged, or if a model needs
    classes that Keras does not know here.
    """
    try:
        return decode_value(text, _KINDS)
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


class StoredColumns:
    """Rows in a folder, in order of arrival."""

    def __init__(self, folder: Path) -> None:
        self._rows = StoredRows(folder)

    def batches(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """Yield batches of rows as columns by name, as `WorkerContext.feed` returns them."""
        size = check_whole_number("batch_size", batch_size, least=1)
        for start in range(0, len(self._rows), size):
            found = self._rows.take(np.arange(start, min(start + size, len(self._rows))))
            yield {key.partition("/")[2]: _to_text(column) for key, column in found.items()}


def _to_text(column: Any) -> Any:
    if column.dtype.kind != "O":
        return column
    texts = np.empty(len(column), object)
    texts[:] = [value.decode() for value in column[:, 0]]
    return texts
