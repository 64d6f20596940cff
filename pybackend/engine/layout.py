"""Layout of the gradients in one flat buffer, and in buckets that are sent together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# TensorFlow uses NumPy's memory without a copy if it has this alignment.
ALIGNMENT = 64
# After the last gradient: weight, request to stop, weight times loss.
TAIL = 3


@dataclass(frozen=True)
class Layout:
    """Layout of the gradients in the flat buffer, and in buckets that are sent together.

    Attributes
    ----------
    shapes
        Shapes of the gradients, in the order of the model's variables.
    spans
        Elements of the buffer that belong to each.
    buckets
        Numbers of the gradients in each bucket. The last layers come first: the backward pass
        reaches them first.
    ranges
        Elements of the buffer that each bucket covers; the last one ends with the tail.
    """

    shapes: tuple[tuple[int, ...], ...]
    spans: tuple[slice, ...]
    buckets: tuple[tuple[int, ...], ...]
    ranges: tuple[slice, ...]

    @property
    def size(self) -> int:
        """Number of elements of the whole buffer."""
        return int(self.ranges[-1].stop)

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], itemsize: int, bucket_bytes: float) -> Layout:
        """Lay out gradients of these shapes in buckets of at least ``bucket_bytes``."""
        step = ALIGNMENT // itemsize
        spans: dict[int, slice] = {}
        buckets: list[list[int]] = [[]]
        starts = [0]
        end = 0
        for number in reversed(range(len(shapes))):
            if buckets[-1] and (end - starts[-1]) * itemsize >= bucket_bytes:
                buckets.append([])
                starts.append(end)
            size = int(np.prod(shapes[number], dtype=np.int64))
            spans[number] = slice(end, end + size)
            buckets[-1].append(number)
            end += -(-size // step) * step
        ends = [*starts[1:], end + TAIL]
        return cls(
            tuple(tuple(shape) for shape in shapes),
            tuple(spans[number] for number in range(len(shapes))),
            tuple(tuple(bucket) for bucket in buckets),
            tuple(slice(a, b) for a, b in zip(starts, ends, strict=True)),
        )
