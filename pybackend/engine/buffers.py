"""Memory for the flat buffer of each step."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.engine.layout import ALIGNMENT

Array = npt.NDArray[Any]


class Buffers:
    """Buffers of one size, aligned so that TensorFlow uses them without a copy.

    TensorFlow may retain an array, even as the value of a variable: a buffer is reused only when
    nothing else refers to it. The system would have to clear new memory at every step.
    """

    def __init__(self, size: int, dtype: Any) -> None:
        self._size = size
        self._dtype = dtype
        self._spare = ALIGNMENT // dtype.itemsize
        self._made: list[Array] = []
        self._unused = 0

    def take(self) -> Array:
        """Return a buffer with arbitrary content, but zeros between the gradients."""
        for number in range(len(self._made)):
            if self._count_references(number) == self._unused:
                return self._align(self._made[number])
        self._made.append(np.zeros(self._size + self._spare, self._dtype))
        self._unused = self._count_references(-1)
        return self._align(self._made[-1])

    def _count_references(self, number: int) -> int:
        """Count the references to a buffer: views of it, and a fixed number of our own."""
        return sys.getrefcount(self._made[number])

    def _align(self, raw: Array) -> Array:
        skip = -raw.ctypes.data % ALIGNMENT // self._dtype.itemsize
        return raw[skip : skip + self._size]
