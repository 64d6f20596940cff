"""Join and slice rows of bytes by Arrow: one call for all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]


def to_offsets(lengths: Index) -> Index:
    """Return the starts of consecutive pieces, and the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def split_bytes(content: Bytes, offsets: Index) -> pa.LargeBinaryArray:
    """Return consecutive bytes as rows, without a copy."""
    import pyarrow as pa

    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def cut_bytes(content: Bytes, starts: Index, ends: Index) -> pa.LargeBinaryArray:
    """Return rows ``content[start:end]``, which must be in order and may have gaps."""
    import pyarrow as pa

    # The gaps between rows are rows of the array, too, so that its offsets are consecutive.
    offsets = np.empty(2 * len(starts) + 1, np.int64)
    offsets[0:-1:2], offsets[1::2] = starts, ends
    offsets[-1] = ends[-1] if len(ends) else 0
    return split_bytes(content, offsets).take(pa.array(np.arange(0, 2 * len(starts), 2)))


def join_columns(columns: Sequence[pa.Array]) -> pa.LargeBinaryArray:
    """Concatenate several columns row by row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.large_binary()))


def get_bytes(rows: pa.LargeBinaryArray) -> tuple[Bytes, Index]:
    """Return the consecutive bytes of all rows and the start of each, without a copy."""
    _, places, content = rows.buffers()
    # Arrow may leave out the buffers of a column without rows.
    offsets = np.zeros(1, np.int64)
    if len(rows):
        offsets = np.frombuffer(places, np.int64)[rows.offset : rows.offset + len(rows) + 1]
    whole = np.frombuffer(content or b"", np.uint8)
    return whole[offsets[0] : offsets[-1]], offsets - offsets[0]


def build_per_size(
    sizes: Index, bytes_for: Callable[[Index], Iterable[bytes]]
) -> pa.LargeBinaryArray:
    """Build rows that depend only on a size, once per distinct size.

    A buffer of n bytes has rows of at most sqrt(2 n) sizes.
    """
    import pyarrow as pa

    if len(sizes) and (sizes == sizes[0]).all():
        (only,) = bytes_for(sizes[:1])
        return pa.repeat(pa.scalar(only, pa.large_binary()), len(sizes))
    coded = pa.array(sizes).dictionary_encode()
    made = pa.array(list(bytes_for(coded.dictionary.to_numpy())), pa.large_binary())
    return made.take(coded.indices)
