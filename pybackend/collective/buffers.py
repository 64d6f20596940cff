"""Arrays as bytes, and the chunks in which they are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CHUNK = 1 << 18
"""Bytes that are sent, received and added at a time: few enough to stay in a core's cache."""


def view_bytes(array: Array) -> memoryview:
    """Return the memory of a contiguous array; an empty array has none that could be viewed."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())


def split_chunks(raw: memoryview) -> list[memoryview]:
    """Cut a buffer into pieces of `CHUNK` bytes, the last one shorter; an empty one has none."""
    return [raw[start : start + CHUNK] for start in range(0, len(raw), CHUNK)]
