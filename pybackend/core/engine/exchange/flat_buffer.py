"""The NumPy half of the gradient exchange: one flat buffer, which a thread sends in buckets.

Every gradient is weighted by the number of rows (or other units) that it averages. The weights are
sent after the gradients, and the sum is divided by the total weight.
"""

from __future__ import annotations

import queue
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pybackend.core.collective import Collective, Compression, Terms

# TensorFlow uses NumPy's memory without a copy if it has this alignment.
ALIGNMENT = 64
# After the last gradient: weight, request to stop, weight times loss.
TAIL = 3


@dataclass(frozen=True)
class BufferLayout:
    """Layout of the gradients in the flat buffer, and in buckets that are sent together.

    Attributes
    ----------
    shapes
        Shapes of the gradients, in the order of the model's variables.
    spans
        Elements of the buffer that belong to each gradient.
    buckets
        Indices of the gradients in each bucket. The last layers come first, because the backward
        pass reaches them first.
    ranges
        Elements of the buffer that each bucket covers; the last one also covers the tail.
    owners
        Rank that needs each mean; empty if all ranks need all means.
    ends
        For each bucket, where the part of each rank ends, in elements from the bucket's start;
        empty without ``owners``.
    added
        Number of other numbers that are summed, between the gradients and the tail.
    """

    shapes: tuple[tuple[int, ...], ...]
    spans: tuple[slice, ...]
    buckets: tuple[tuple[int, ...], ...]
    ranges: tuple[slice, ...]
    owners: tuple[int, ...] = ()
    ends: tuple[tuple[int, ...], ...] = ()
    added: int = 0

    @property
    def size(self) -> int:
        return int(self.ranges[-1].stop)

    @classmethod
    def of(
        cls,
        shapes: Sequence[tuple[int, ...]],
        itemsize: int,
        bucket_bytes: float,
        owners: Sequence[int] = (),
        ranks: int = 1,
        added: int = 0,
    ) -> BufferLayout:
        """Lay out gradients of these shapes in buckets of at least ``bucket_bytes``.

        With ``owners``, each bucket has the gradients of rank 0 first, then those of rank 1, etc.
        """
        step = ALIGNMENT // itemsize
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        padded = [-(-size // step) * step for size in sizes]
        buckets: list[list[int]] = [[]]
        for number in reversed(range(len(shapes))):
            if buckets[-1] and sum(padded[n] for n in buckets[-1]) * itemsize >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(number)
        spans: dict[int, slice] = {}
        starts, ends, end = [], [], 0
        for bucket in buckets:
            if owners:
                bucket.sort(key=lambda number: owners[number])
                parts = [sum(padded[n] for n in bucket if owners[n] == r) for r in range(ranks)]
                ends.append(tuple(np.cumsum(parts).tolist()))
            starts.append(end)
            for number in bucket:
                spans[number] = slice(end, end + sizes[number])
                end += padded[number]
        stops = [*starts[1:], end + added + TAIL]
        places = tuple(spans[number] for number in range(len(shapes)))
        groups, ranges = tuple(map(tuple, buckets)), tuple(map(slice, starts, stops))
        return cls(tuple(shapes), places, groups, ranges, tuple(owners), tuple(ends), added)

    def list_needed(self, rank: int) -> list[int]:
        """Return the indices of the gradients whose means a rank needs."""
        return [n for n in range(len(self.shapes)) if not self.owners or self.owners[n] == rank]


Array = npt.NDArray[Any]


class Buffers:
    """Buffers of at most one size, aligned so that TensorFlow can use them without copying.

    TensorFlow may retain an array, even as the value of a variable: a buffer is reused only when
    nothing else refers to it. New memory would have to be cleared by the system at every step.
    """

    def __init__(self, size: int, dtype: Any) -> None:
        self._size, self._dtype = size, dtype
        self._spare = ALIGNMENT // dtype.itemsize
        self._made: list[Array] = []
        self._skipped: list[int] = []  # elements before the first aligned one
        self._unused = 0

    def take(self, size: int) -> Array:
        """Return a buffer with the content of an earlier use, or zeros."""
        for number in range(len(self._made)):
            if self._count_references(number) == self._unused:
                return self._view(number, size)
        self._made.append(np.zeros(self._size + self._spare, self._dtype))
        self._skipped.append(-self._made[-1].ctypes.data % ALIGNMENT // self._dtype.itemsize)
        self._unused = self._count_references(-1)
        return self._view(-1, size)

    def _count_references(self, number: int) -> int:
        """Count the references to a buffer: views of it, and a fixed number of our own."""
        return sys.getrefcount(self._made[number])

    def _view(self, number: int, size: int) -> Array:
        first = self._skipped[number]
        return self._made[number][first : first + size]


class BucketSender:
    """Thread that sends the buckets of a step in order, each as soon as it is ready."""

    def __init__(self, buckets: int, send: Callable[[Array, int], None]) -> None:
        self._buckets, self._send = buckets, send
        self._lock = threading.Lock()
        self._flat: Array | None = None
        self._ready: queue.Queue[int | None] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()
        threading.Thread(target=self._run, name="tfdist-exchange", daemon=True).start()

    def buffer(self, make: Callable[[], Array]) -> Array:
        """Return the buffer of this step; the first caller creates it."""
        with self._lock:
            if self._flat is None:
                self._flat = make()
            return self._flat

    def mark_ready(self, bucket: int) -> None:
        """Mark a bucket as filled; buckets may become ready in any order."""
        self._ready.put(bucket)

    def finish(self) -> Array:
        """Wait for the last bucket; the caller then owns the buffer.

        Raises the error with which sending failed in the thread.
        """
        if (error := self._done.get()) is not None:
            raise error
        flat, self._flat = self._flat, None
        assert flat is not None
        return flat

    def close(self) -> None:
        """End the thread once it has sent all buckets that are ready."""
        self._ready.put(None)

    def _run(self) -> None:
        waiting: set[int] = set()
        due = 0
        while (bucket := self._ready.get()) is not None:
            waiting.add(bucket)
            try:
                # In the same order on all workers, although they become ready in any order.
                while due in waiting:
                    waiting.remove(due)
                    assert self._flat is not None
                    self._send(self._flat, due)
                    due += 1
            except BaseException as error:
                self._done.put(error)
                return
            if due == self._buckets:
                due = 0
                self._done.put(None)


Means = tuple[list[Array], float]


@dataclass
class StopAgreement:
    """Agreement of the workers to stop, exchanged with the gradients."""

    is_requested: bool = False
    """True if this worker requests that the training stops."""
    is_preempted: bool = False
    """True if this worker was preempted and requests that all leave."""
    is_agreed: bool = False
    """True if some worker requests either, known to all since the same step."""


class FlatExchange:
    """Average of lists of gradients over all workers.

    ``dtype`` is that of the buffer: float32, or float64 if any gradient is. ``nominal`` returns the
    expected total weight of this step's global batch, the same on all workers: gradients are
    divided by it before they are summed, so that the sum has the size of a mean, and is the mean if
    this equals the actual total. ``compression`` is ``"fp16"`` or ``"bf16"`` on the wire, or None;
    None if the layout has owners. ``buffers`` are also used for something else between two
    exchanges; None: own ones.
    """

    def __init__(
        self,
        collective: Collective,
        layout: BufferLayout,
        dtype: Any,
        agreement: StopAgreement,
        *,
        nominal: Callable[[], float],
        compression: Literal["fp16", "bf16"] | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.layout, self._collective, self._dtype = layout, collective, np.dtype(dtype)
        self._agreement, self._nominal = agreement, nominal
        self._codecs = [Compression(compression) if compression else None for _ in layout.buckets]
        # Created here, not when first used: TensorFlow may pass two buckets at once.
        has_several = len(layout.buckets) > 1
        self._sender = BucketSender(len(layout.buckets), self._sum) if has_several else None
        self._pending: Array | None = None
        self._buffers = buffers or Buffers(layout.size, self._dtype)
        self._needed = layout.list_needed(collective.rank)
        self.mean_loss = 0.0
        """Mean loss of the global batch at the last step."""
        self.added: Array = np.empty(0)
        """Sums of the other numbers at the last step."""

    @property
    def sizes(self) -> list[int]:
        """Number of bytes that a ring sends for each bucket."""
        codec = self._codecs[0]
        itemsize = self._dtype.itemsize if codec is None else codec.itemsize
        return [(part.stop - part.start) * itemsize for part in self.layout.ranges]

    def exchange(self, weight: Any, loss: Any, arrays: Sequence[Array], added: Any = ()) -> Means:
        """Return the mean of each array over the total weight of all workers, and that total.

        If the layout has owners, only the means that this rank needs are returned. ``weight`` is
        that of this worker's arrays, e.g. its number of rows; its mean ``loss`` is averaged in the
        same way. ``added`` are this worker's terms of the other sums.
        """
        flat = self._take()
        self._fill_added(flat, added)
        all_terms = self._all_terms(flat, weight / self._nominal(), arrays)
        return self._exchange_all(flat, weight, loss, self._nominal(), all_terms)

    def accumulate(self, share: float, loss: Any, arrays: Sequence[Array], is_due: bool) -> Means:
        """Add up the gradients of several steps here, and send their sum when it is due.

        In between, the optimizer gets zeros, which it adds to its own accumulators. It still counts
        its steps, and divides by their number itself. ``share`` is this worker's share of the rows
        in the step's global batch, from 0 to 1.
        """
        flat = self._take()
        for bucket, terms in enumerate(self._all_terms(flat, share, arrays)):
            terms(0, flat[self.layout.ranges[bucket]])
        if self._pending is not None:
            flat[:-TAIL] += self._pending[:-TAIL]
        if not is_due:
            self._pending = flat
            return [np.zeros(self.layout.shapes[n], flat.dtype) for n in self._needed], 1.0
        self._pending = None
        # The shares of all workers add up to one, so the sum is a mean already.
        return self._exchange_all(flat, 1 / self._collective.world_size, loss, 1.0)

    def post(self, bucket: int, weight: Any, arrays: Sequence[Array]) -> None:
        """Hand over one bucket, which is sent while the next one is computed."""
        assert self._sender is not None
        flat = self._sender.buffer(self._take)
        terms = self._terms(flat, bucket, weight / self._nominal(), arrays)
        terms(0, flat[self.layout.ranges[bucket]])
        if bucket < len(self.layout.buckets) - 1:
            self._sender.mark_ready(bucket)

    def collect(self, weight: Any, loss: Any, added: Any = ()) -> Means:
        """Return the result of `exchange` once all buckets have been posted."""
        sender = self._sender
        assert sender is not None
        flat = sender.buffer(self._take)
        self._fill_added(flat, added)
        self._fill_tail(flat, weight, loss)
        sender.mark_ready(len(self.layout.buckets) - 1)
        return self._mean(sender.finish(), self._nominal())

    def read_state(self) -> dict[str, Any]:
        """Return what has not been sent yet: accumulated gradients and rounding errors."""
        # Accumulated gradients in their order, as buckets depend on the owners.
        parts, whole = self.layout.spans, self._pending
        pending = None if whole is None else [np.array(whole[span]) for span in parts]
        return {"pending": pending, "residuals": [c and c.read_residuals() for c in self._codecs]}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        self._pending = None
        if state["pending"] is not None:
            self._pending = self._take()
            self._pending[:] = 0
            for span, array in zip(self.layout.spans, state["pending"], strict=True):
                self._pending[span] = array
        codecs = [codec for codec in self._codecs if codec is not None]
        if codecs:  # else the number of buckets may differ
            for codec, residuals in zip(codecs, state["residuals"], strict=True):
                codec.restore_residuals(residuals)

    def close(self) -> None:
        """End the thread that sends buckets, if there is one."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _take(self) -> Array:
        return self._buffers.take(self.layout.size)

    def _exchange_all(
        self,
        flat: Array,
        weight: Any,
        loss: Any,
        nominal: float,
        all_terms: Sequence[Terms | None] | None = None,
    ) -> Means:
        self._fill_tail(flat, weight, loss)
        for bucket, terms in enumerate(all_terms or [None] * len(self.layout.buckets)):
            self._sum(flat, bucket, terms)
        return self._mean(flat, nominal)

    def _all_terms(self, flat: Array, factor: float, arrays: Sequence[Array]) -> list[Terms]:
        return [
            self._terms(flat, bucket, factor, [arrays[number] for number in numbers])
            for bucket, numbers in enumerate(self.layout.buckets)
        ]

    def _terms(self, flat: Array, bucket: int, factor: float, arrays: Sequence[Array]) -> Terms:
        """Return the terms of a bucket: gradients times a factor, else what the buffer has.

        So gradients are written where they are summed; `all_reduce` describes the function.
        """
        spans = [self.layout.spans[number] for number in self.layout.buckets[bucket]]
        ends, scale = [span.stop for span in spans], self._dtype.type(factor)
        flats = [a.reshape(s.stop - s.start) for a, s in zip(arrays, spans, strict=True)]
        first = self.layout.ranges[bucket].start

        def write(start: int, out: Array) -> None:
            done = begin = first + start
            stop = begin + len(out)
            for number in range(bisect_right(ends, begin), len(spans)):
                span = slice(max(spans[number].start, begin), min(ends[number], stop))
                if span.start >= stop:
                    break
                out[done - begin : span.start - begin] = flat[done : span.start]
                skipped = spans[number].start
                own = flats[number][span.start - skipped : span.stop - skipped]
                np.multiply(own, scale, out=out[span.start - begin : span.stop - begin])
                done = span.stop
            out[done - begin :] = flat[done:stop]

        return write

    def _fill_added(self, flat: Array, added: Any) -> None:
        if self.layout.added:
            flat[-TAIL - self.layout.added : -TAIL] = added

    def _fill_tail(self, flat: Array, weight: Any, loss: Any) -> None:
        wants_end = self._agreement.is_requested or self._agreement.is_preempted
        flat[-TAIL:] = (weight, wants_end, weight * loss)

    def _sum(self, flat: Array, bucket: int, terms: Terms | None = None) -> None:
        part = self.layout.ranges[bucket]
        codec = self._codecs[bucket]
        is_apart = codec is not None or bool(self.layout.owners)
        if is_apart and part.stop == self.layout.size:
            # Weights must not be rounded, and all ranks need them.
            self._collective.all_reduce(flat[-TAIL:])
            part = slice(part.start, part.stop - TAIL)
        if not self.layout.owners:
            self._collective.all_reduce(flat[part], codec, terms)
            return
        if terms:
            terms(0, flat[part])
        self._collective.reduce_scatter(flat[part], self.layout.ends[bucket])

    def _mean(self, flat: Array, nominal: float) -> Means:
        total, stop, loss = (float(value) for value in flat[-TAIL:])
        if self.layout.added:
            self.added = np.array(flat[-TAIL - self.layout.added : -TAIL])
        if total != nominal and total:
            flat *= self._dtype.type(nominal / total)
        self._agreement.is_agreed |= stop > 0
        # If no worker has rows, all are zeros; the end of the epoch detects that.
        self.mean_loss = loss / total if total else 0.0
        spans, shapes = self.layout.spans, self.layout.shapes
        return [flat[spans[n]].reshape(shapes[n]) for n in self._needed], total


@dataclass(frozen=True)
class Parts:
    """Shapes of the trainable weights, and the rank that updates each of them."""

    shapes: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class TransferSettings:
    """Options of the gradient exchange, as in `barrier_train`."""

    nominal_rows: int
    bucket_bytes: float
    compression: Literal["fp16", "bf16"] | None = None
