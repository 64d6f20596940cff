"""Columns whose rows have different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: row i is ``values[offsets[i]:offsets[i + 1]]``.

    With ``values`` of shape (n, 3), a row is a list of vectors of 3 numbers.
    With ``is_text`` the values are UTF-8 bytes, and a row is one string.
    """

    values: Array
    offsets: Array
    is_text: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """Number of values in each row."""
        return np.diff(self.offsets)

    def __getitem__(self, rows: slice) -> Ragged:
        """Copy some rows."""
        places = np.arange(len(self))[rows]
        lengths = self.lengths[places]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        elements = np.repeat(self.offsets[places] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.values[elements], offsets, self.is_text)


def concatenate(parts: Sequence[Ragged]) -> Ragged:
    """Concatenate ragged columns of the same type."""
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
    return Ragged(np.concatenate(values), offsets, parts[0].is_text)


def to_dense(column: Array | Ragged, longest: int = 0) -> Array:
    """Convert a column to an array: strings of shape (rows, 1), or values padded with zeros.

    Parameters
    ----------
    longest
        Minimum length of padded rows.
    """
    if not isinstance(column, Ragged):
        return column
    values = column.values[column.offsets[0] : column.offsets[-1]]
    if column.is_text:
        content, edges = values.tobytes(), (column.offsets - column.offsets[0]).tolist()
        return to_strings([content[first:last] for first, last in pairwise(edges)])
    lengths = column.lengths
    width = max(longest, int(lengths.max(initial=0)))
    padded = np.zeros((len(column), width, *values.shape[1:]), values.dtype)
    padded[np.arange(width) < lengths[:, None]] = values
    return padded


def to_strings(texts: Sequence[bytes]) -> Array:
    """Convert strings to a column of shape (rows, 1)."""
    strings = np.empty((len(texts), 1), object)
    strings[:, 0] = texts
    return strings
