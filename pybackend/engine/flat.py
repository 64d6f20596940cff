"""The numpy half of the gradient exchange: one flat buffer, cut into buckets that travel in turn.

Every gradient is weighted by the rows (or other units) that it is the mean over; the weights travel
behind the gradients, and the sum is divided by their total.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pybackend.collective import Collective, Compression

Array = npt.NDArray[Any]
Means = tuple[list[Array], float]

# TensorFlow takes over numpy's memory without a copy where it is aligned so.
_ALIGNMENT = 64
# Behind the last gradient: weight, request to stop, weight times loss.
_TAIL = 3


@dataclass(frozen=True)
class Layout:
    """Where each gradient lies in the flat buffer, and which ones travel together.

    Attributes
    ----------
    shapes
        Of the gradients, in the order of the model's variables.
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
        """Elements of the whole buffer."""
        return int(self.ranges[-1].stop)

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], itemsize: int, bucket_bytes: float) -> Layout:
        """Lay out gradients of these shapes in buckets of at least ``bucket_bytes``."""
        step = _ALIGNMENT // itemsize
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
        ends = [*starts[1:], end + _TAIL]
        return cls(
            tuple(tuple(shape) for shape in shapes),
            tuple(spans[number] for number in range(len(shapes))),
            tuple(tuple(bucket) for bucket in buckets),
            tuple(slice(a, b) for a, b in zip(starts, ends, strict=True)),
        )


@dataclass
class Agreement:
    """What the workers tell each other along with the gradients."""

    stop_asked: bool = False
    """This worker wants the training to stop."""
    stop_agreed: bool = False
    """Some worker wants it to stop, and all know it since the same step."""


class FlatExchange:
    """Averages lists of gradients over all workers.

    Parameters
    ----------
    dtype
        Of the buffer: float32, or float64 where any gradient is.
    nominal
        Returns what the total weight of this step's global batch will be, or about so, the same on
        all workers. It is divided out before the sum: what travels has the size of a mean gradient,
        and is one where the total turns out to be just that.
    compression
        ``"fp16"`` or ``"bf16"`` on the wire, or None.
    """

    def __init__(
        self,
        collective: Collective,
        layout: Layout,
        dtype: Any,
        agreement: Agreement,
        *,
        nominal: Callable[[], float],
        compression: Literal["fp16", "bf16"] | None = None,
    ) -> None:
        self.layout = layout
        self._collective = collective
        self._dtype = np.dtype(dtype)
        self._agreement = agreement
        self._nominal = nominal
        self._codecs = [Compression(compression) if compression else None for _ in layout.buckets]
        # Made here, not when first used: TensorFlow may hand over two buckets at once.
        several = len(layout.buckets) > 1
        self._pipeline = Pipeline(len(layout.buckets), self._sum) if several else None
        self._pending: Array | None = None
        self._buffers = Buffers(layout.size, self._dtype)
        self.mean_loss = 0.0
        """Of the global batch at the last step."""

    def exchange(self, weight: Any, loss: Any, arrays: Sequence[Array]) -> Means:
        """Mean of each array over the total weight of all workers, and that total.

        Parameters
        ----------
        weight
            Of this worker's arrays, e.g. its rows.
        loss
            This worker's mean loss, to be averaged in the same way.
        """
        flat = self._buffers.take()
        self._fill_all(flat, weight / self._nominal(), arrays)
        return self._exchange_filled(flat, weight, loss, self._nominal())

    def accumulate(self, share: float, loss: Any, arrays: Sequence[Array], is_due: bool) -> Means:
        """Add up the gradients of several steps here, and send their sum when it is due.

        In between, the optimizer is given zeros, which it adds to its own accumulators: it counts
        its steps as ever, and divides by their number itself.

        Parameters
        ----------
        share
            This worker's part of the rows of the step's global batch, from 0 to 1.
        """
        flat = self._buffers.take()
        self._fill_all(flat, share, arrays)
        if self._pending is not None:
            flat[:-_TAIL] += self._pending[:-_TAIL]
        if not is_due:
            self._pending = flat
            return [np.zeros(shape, flat.dtype) for shape in self.layout.shapes], 1.0
        self._pending = None
        # The shares of all workers add up to one, so what is summed is a mean already.
        return self._exchange_filled(flat, 1 / self._collective.world_size, loss, 1.0)

    def post(self, bucket: int, weight: Any, arrays: Sequence[Array]) -> None:
        """Hand over one bucket, which travels while the next is computed."""
        pipeline = self._pipeline
        assert pipeline is not None
        flat = pipeline.buffer(self._buffers.take)
        self._fill(flat, bucket, weight / self._nominal(), arrays)
        if bucket < len(self.layout.buckets) - 1:
            pipeline.ready(bucket)

    def collect(self, weight: Any, loss: Any) -> Means:
        """The means, once all buckets were posted; as `exchange`."""
        pipeline = self._pipeline
        assert pipeline is not None
        self._fill_tail(pipeline.buffer(self._buffers.take), weight, loss)
        pipeline.ready(len(self.layout.buckets) - 1)
        return self._mean(pipeline.finish(), self._nominal())

    def close(self) -> None:
        """End the thread that sends buckets, where there is one."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def _exchange_filled(self, flat: Array, weight: Any, loss: Any, nominal: float) -> Means:
        self._fill_tail(flat, weight, loss)
        for bucket in range(len(self.layout.buckets)):
            self._sum(flat, bucket)
        return self._mean(flat, nominal)

    def _fill_all(self, flat: Array, factor: float, arrays: Sequence[Array]) -> None:
        for bucket, members in enumerate(self.layout.buckets):
            self._fill(flat, bucket, factor, [arrays[number] for number in members])

    def _fill(self, flat: Array, bucket: int, factor: float, arrays: Sequence[Array]) -> None:
        for number, array in zip(self.layout.buckets[bucket], arrays, strict=True):
            part = flat[self.layout.spans[number]]
            np.multiply(array.reshape(-1), self._dtype.type(factor), out=part)

    def _fill_tail(self, flat: Array, weight: Any, loss: Any) -> None:
        flat[-_TAIL:] = (weight, self._agreement.stop_asked, weight * loss)

    def _sum(self, flat: Array, bucket: int) -> None:
        part = self.layout.ranges[bucket]
        codec = self._codecs[bucket]
        if codec is not None and part.stop == self.layout.size:
            # Weights must arrive as they are.
            self._collective.all_reduce(flat[-_TAIL:])
            part = slice(part.start, part.stop - _TAIL)
        self._collective.all_reduce(flat[part], codec)

    def _mean(self, flat: Array, nominal: float) -> Means:
        total, stop, loss = (float(value) for value in flat[-_TAIL:])
        if total != nominal and total:
            flat *= self._dtype.type(nominal / total)
        self._agreement.stop_agreed |= stop > 0
        # Where no worker has rows, which the end of the epoch will tell, all are zeros.
        self.mean_loss = loss / total if total else 0.0
        places = zip(self.layout.spans, self.layout.shapes, strict=True)
        return [flat[span].reshape(shape) for span, shape in places], total


class Buffers:
    """Memory for the flat buffer of each step, aligned so that TensorFlow takes it over as it is.

    TensorFlow may keep what it is given, even as the value of a variable: a buffer is used again
    only when nobody else holds it. New memory at every step would be cleared by the system first.
    """

    def __init__(self, size: int, dtype: Any) -> None:
        self._size = size
        self._dtype = dtype
        self._spare = _ALIGNMENT // dtype.itemsize
        self._made: list[Array] = []
        self._unused = 0

    def take(self) -> Array:
        """A buffer of any content; zeros where no gradient lies."""
        for place in range(len(self._made)):
            if self._holders(place) == self._unused:
                return self._aligned(self._made[place])
        self._made.append(np.zeros(self._size + self._spare, self._dtype))
        self._unused = self._holders(-1)
        return self._aligned(self._made[-1])

    def _holders(self, place: int) -> int:
        """References to a buffer: views of it, and a fixed number of our own."""
        return sys.getrefcount(self._made[place])

    def _aligned(self, raw: Array) -> Array:
        skip = -raw.ctypes.data % _ALIGNMENT // self._dtype.itemsize
        return raw[skip : skip + self._size]


class Pipeline:
    """Sends the buckets of a step in their order, on a thread, as soon as each is ready."""

    def __init__(self, buckets: int, send: Callable[[Array, int], None]) -> None:
        self._buckets = buckets
        self._send = send
        self._lock = threading.Lock()
        self._flat: Array | None = None
        self._ready: queue.Queue[int | None] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()
        threading.Thread(target=self._run, name="tfdist-exchange", daemon=True).start()

    def buffer(self, new: Callable[[], Array]) -> Array:
        """The buffer of this step; the first to ask makes it."""
        with self._lock:
            if self._flat is None:
                self._flat = new()
            return self._flat

    def ready(self, bucket: int) -> None:
        """Say that a bucket is filled; buckets may become ready in any order."""
        self._ready.put(bucket)

    def finish(self) -> Array:
        """Wait for the last bucket; the buffer is the caller's then.

        Raises
        ------
        TfdistError
            What went wrong on the thread.
        """
        error = self._done.get()
        if error is not None:
            raise error
        flat, self._flat = self._flat, None
        assert flat is not None
        return flat

    def close(self) -> None:
        """End the thread after what it is doing."""
        self._ready.put(None)

    def _run(self) -> None:
        waiting: set[int] = set()
        due = 0
        while (bucket := self._ready.get()) is not None:
            waiting.add(bucket)
            try:
                # In one order on all workers, whatever the order in which they became ready.
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
