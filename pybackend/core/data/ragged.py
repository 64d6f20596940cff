"""Columns whose rows have different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: row i is ``values[offsets[i]:offsets[i + 1]]``.

    With ``values`` of shape (n, 3), a row is a list of vectors of 3 numbers.
    With ``is_text`` the values are UTF-8 bytes, and a row is one string. With ``most_texts``, which
    is at least the length of the longest list, a row is a list of strings (see `pack_lists`).
    """

    values: Array
    offsets: Array
    is_text: bool = False
    most_texts: int | None = None

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
        return replace(self, values=self.values[elements], offsets=offsets)


def concatenate(parts: Sequence[Ragged]) -> Ragged:
    """Concatenate ragged columns of the same type."""
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
    most = None if parts[0].most_texts is None else max(part.most_texts or 0 for part in parts)
    return Ragged(np.concatenate(values), offsets, parts[0].is_text, most)


def join_texts(texts: Sequence[bytes], rows: int) -> Ragged:
    """Return strings as this number of rows, each with the same number of strings."""
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64)
    column = Ragged(np.frombuffer(b"".join(texts), np.uint8), offsets, is_text=True)
    return column if len(texts) == rows else pack_lists(column, np.full(rows, len(texts) // rows))


def pack_lists(texts: Ragged, sizes: Array) -> Ragged:
    """Join strings to lists of these sizes; in a row, each string follows its length in 4 bytes."""
    starts = texts.offsets[:-1] + 4 * np.arange(len(texts))
    packed = np.empty(len(texts.values) + 4 * len(texts), np.uint8)
    is_length = np.zeros(len(packed), bool)
    heads = starts[:, None] + np.arange(4)
    is_length[heads] = True
    packed[heads] = texts.lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    packed[~is_length] = texts.values
    offsets = np.append(starts, len(packed))[np.concatenate([[0], np.cumsum(sizes)])]
    return Ragged(packed, offsets, is_text=True, most_texts=int(sizes.max(initial=0)))


def unpack_list(row: bytes) -> list[bytes]:
    """Return the strings of a row that `pack_lists` packed."""
    texts, start = [], 0
    while start < len(row):
        end = start + 4 + int.from_bytes(row[start : start + 4], "little")
        texts.append(row[start + 4 : end])
        start = end
    return texts


def to_dense(column: Array | Ragged, longest: int = 0) -> Array:
    """Convert a column to an array: values padded with zeros, or strings.

    Strings have shape (rows, 1), lists of strings (rows, longest), padded with empty strings.

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
        rows = [content[first:last] for first, last in pairwise(edges)]
        if column.most_texts is None:
            return to_strings([[row] for row in rows], 1)
        return to_strings([unpack_list(row) for row in rows], longest)
    lengths = column.lengths
    width = max(longest, int(lengths.max(initial=0)))
    padded = np.zeros((len(column), width, *values.shape[1:]), values.dtype)
    padded[np.arange(width) < lengths[:, None]] = values
    return padded


def to_strings(rows: Sequence[Sequence[bytes]], longest: int) -> Array:
    """Convert lists of strings to an array, padded with empty strings to at least this length."""
    strings = np.full((len(rows), max([longest, *map(len, rows)])), b"", object)
    for row, texts in enumerate(rows):
        strings[row, : len(texts)] = texts
    return strings
