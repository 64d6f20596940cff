"""Collectives along the ring of ranks, each of which forwards data while receiving it.

The all-reduce is the reduce-scatter and all-gather of Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009): every rank sends 2 (N - 1) / N of the
buffer, for any N. Each segment is summed along one chain of ranks and then passed on, so all ranks
get identical bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pybackend.collective.buffers import CHUNK, Array, split_chunks, view_bytes
from pybackend.collective.call import Call
from pybackend.collective.compression import Compression
from pybackend.collective.half import BLOCK
from pybackend.collective.links import Link


@dataclass(frozen=True)
class Ring:
    """Rank on the ring, with links to the ranks before and after it."""

    rank: int
    world_size: int
    before: Link
    after: Link

    def all_reduce(self, call: Call, buffer: Array, scratch: Array) -> None:
        """Sum in place. ``scratch`` has room for `CHUNK` bytes.

        Each chunk is added when it is received, and sent on when it is added.
        """
        segments = self._cut(len(buffer), CHUNK // buffer.itemsize)
        # Received data are added and sent next, so both are cut at the same positions.
        summed = list(chain(*segments[1:]))
        received = scratch.view(buffer.dtype)

        def add(index: int) -> None:
            if index < len(summed):
                part = buffer[summed[index]]
                np.add(part, received[: len(part)], out=part)

        raw = view_bytes(buffer)
        incoming = [
            *_slice_views(scratch.data, buffer.itemsize, (_move_to_zero(span) for span in summed)),
            *_slice_views(raw, buffer.itemsize, chain(*segments[:-1])),
        ]
        outgoing = _slice_views(raw, buffer.itemsize, chain(*segments, *segments[:-2]))
        ready = len(segments[0])
        call.flow(self.after, outgoing, self.before, incoming, ready=ready, arrived=add)

    def all_reduce_coded(
        self, call: Call, buffer: Array, scratch: Array, codec: Compression
    ) -> None:
        """Sum in place like `all_reduce`, with data sent in half precision and float32 sums.

        The rank that completes a segment also rounds its own copy.
        """
        residual, wire = codec.residual(len(buffer)), codec.wire(len(buffer))
        segments = self._cut(len(buffer), BLOCK)
        summed, final = list(chain(*segments[1:])), list(chain(*segments[:-1]))
        received = scratch.view(wire.dtype)
        for span in segments[0]:
            codec.encode(buffer[span], wire[span], residual[span])

        def use(index: int) -> None:
            if index < len(summed):
                span = summed[index]
                codec.add(received[: span.stop - span.start], buffer[span])
                codec.encode(buffer[span], wire[span], residual[span])
            else:
                span = final[index - len(summed)]
                codec.decode(wire[span], buffer[span])

        raw = view_bytes(wire)
        incoming = [
            *_slice_views(scratch.data, wire.itemsize, (_move_to_zero(span) for span in summed)),
            *_slice_views(raw, wire.itemsize, final),
        ]
        outgoing = _slice_views(raw, wire.itemsize, chain(*segments, *segments[:-2]))
        ready = len(segments[0])
        call.flow(self.after, outgoing, self.before, incoming, ready=ready, arrived=use)

    def all_gather(self, call: Call, parts: Sequence[Array]) -> None:
        """Fill the arrays of all other ranks with the data that these ranks send."""
        order = [(self.rank - step) % self.world_size for step in range(self.world_size)]
        pieces = [split_chunks(view_bytes(parts[rank])) for rank in order]
        outgoing, incoming = list(chain(*pieces[:-1])), list(chain(*pieces[1:]))
        call.flow(self.after, outgoing, self.before, incoming, ready=len(pieces[0]))

    def broadcast(self, call: Call, raw: memoryview, root: int) -> None:
        """Pass the root's bytes on from rank to rank, up to the one before the root."""
        self.pass_on(call, raw, root, (root - 1) % self.world_size)

    def pass_on(self, call: Call, raw: memoryview, first: int, last: int) -> None:
        """Pass the first rank's bytes on along the ring up to the last one; others do nothing."""
        size = self.world_size
        if (self.rank - first) % size > (last - first) % size:
            return
        pieces = split_chunks(raw)
        before = None if self.rank == first else self.before
        after = None if self.rank == last else self.after
        call.flow(after, pieces, before, pieces, ready=0 if before else len(pieces))

    def _cut(self, length: int, step: int) -> list[list[slice]]:
        """Cut a buffer into segments, and these into spans of ``step`` elements, in sending order.

        In the first round this rank sends all segments but the last, and receives and adds all but
        the first; then the last one is complete. In the second round it sends the last one and then
        all but the last two, and receives all but the last.
        """
        size = self.world_size
        segments = []
        for turn in range(size):
            k = (self.rank - turn) % size
            start, stop = length * k // size, length * (k + 1) // size
            segments.append([slice(at, min(at + step, stop)) for at in range(start, stop, step)])
        return segments


def _slice_views(raw: memoryview, itemsize: int, spans: Iterable[slice]) -> list[memoryview]:
    return [raw[span.start * itemsize : span.stop * itemsize] for span in spans]


def _move_to_zero(span: slice) -> slice:
    return slice(0, span.stop - span.start)
