"""The numpy half of the gradient exchange: one flat buffer, cut into buckets that travel in turn.

Every gradient is weighted by the rows (or other units) that it is the mean over; the weights travel
behind the gradients, and the sum is divided by their total.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pybackend.collective import Collective, Compression
from pybackend.engine.bucket_sender import BucketSender
from pybackend.engine.buffers import Buffers
from pybackend.engine.layout import TAIL, Layout

Array = npt.NDArray[Any]
Means = tuple[list[Array], float]


@dataclass
class StopAgreement:
    """Whether to stop, which the workers agree on along with the gradients."""

    is_requested: bool = False
    """This worker wants the training to stop."""
    is_told: bool = False
    """This worker was told to end, and wants all to leave."""
    is_agreed: bool = False
    """Some worker wants either, and all know it since the same step."""


class FlatExchange:
    """Averages lists of gradients over all workers.

    Parameters
    ----------
    dtype
        Of the buffer: float32, or float64 if any gradient is.
    nominal
        Returns what the total weight of this step's global batch will be, or about so, the same on
        all workers. It is divided out before the sum: what travels has the size of a mean gradient,
        and is one if the total turns out to be just that.
    compression
        ``"fp16"`` or ``"bf16"`` on the wire, or None.
    """

    def __init__(
        self,
        collective: Collective,
        layout: Layout,
        dtype: Any,
        agreement: StopAgreement,
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
        has_several = len(layout.buckets) > 1
        self._sender = BucketSender(len(layout.buckets), self._sum) if has_several else None
        self._pending: Array | None = None
        self._buffers = Buffers(layout.size, self._dtype)
        self.mean_loss = 0.0
        """Of the global batch at the last step."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each bucket on the wire of a ring."""
        codec = self._codecs[0]
        itemsize = self._dtype.itemsize if codec is None else codec.itemsize
        return [(part.stop - part.start) * itemsize for part in self.layout.ranges]

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
            flat[:-TAIL] += self._pending[:-TAIL]
        if not is_due:
            self._pending = flat
            return [np.zeros(shape, flat.dtype) for shape in self.layout.shapes], 1.0
        self._pending = None
        # The shares of all workers add up to one, so what is summed is a mean already.
        return self._exchange_filled(flat, 1 / self._collective.world_size, loss, 1.0)

    def post(self, bucket: int, weight: Any, arrays: Sequence[Array]) -> None:
        """Hand over one bucket, which travels while the next is computed."""
        sender = self._sender
        assert sender is not None
        flat = sender.buffer(self._buffers.take)
        self._fill(flat, bucket, weight / self._nominal(), arrays)
        if bucket < len(self.layout.buckets) - 1:
            sender.mark_ready(bucket)

    def collect(self, weight: Any, loss: Any) -> Means:
        """The means, once all buckets were posted; as `exchange`."""
        sender = self._sender
        assert sender is not None
        self._fill_tail(sender.buffer(self._buffers.take), weight, loss)
        sender.mark_ready(len(self.layout.buckets) - 1)
        return self._mean(sender.finish(), self._nominal())

    def read_state(self) -> dict[str, Any]:
        """What was not sent yet: gradients that are being accumulated, and rounding errors."""
        pending = None if self._pending is None else np.array(self._pending)
        return {"pending": pending, "residuals": [c and c.read_residuals() for c in self._codecs]}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `read_state` returned."""
        self._pending = state["pending"]
        for codec, residuals in zip(self._codecs, state["residuals"], strict=True):
            if codec is not None:
                codec.restore_residuals(residuals)

    def close(self) -> None:
        """End the thread that sends buckets, if there is one."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

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
        flat[-TAIL:] = (weight, self._wants_end(), weight * loss)

    def _wants_end(self) -> bool:
        return self._agreement.is_requested or self._agreement.is_told

    def _sum(self, flat: Array, bucket: int) -> None:
        part = self.layout.ranges[bucket]
        codec = self._codecs[bucket]
        if codec is not None and part.stop == self.layout.size:
            # Weights must arrive as they are.
            self._collective.all_reduce(flat[-TAIL:])
            part = slice(part.start, part.stop - TAIL)
        self._collective.all_reduce(flat[part], codec)

    def _mean(self, flat: Array, nominal: float) -> Means:
        total, stop, loss = (float(value) for value in flat[-TAIL:])
        if total != nominal and total:
            flat *= self._dtype.type(nominal / total)
        self._agreement.is_agreed |= stop > 0
        # If no worker has rows, which the end of the epoch will show, all are zeros.
        self.mean_loss = loss / total if total else 0.0
        parts = zip(self.layout.spans, self.layout.shapes, strict=True)
        return [flat[span].reshape(shape) for span, shape in parts], total
