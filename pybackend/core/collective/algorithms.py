"""Collectives by recursive doubling or along a ring, whichever is predicted to be faster.

Recursive doubling, and the model of costs, are those of Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005). If the number of ranks is not
a power of two, the first ranks are folded in pairs beforehand, and unfolded afterwards. Both ranks
of an exchange add the same two sums in the same order, so all ranks get identical bits. In the
model, a message of n bytes takes alpha + n beta, and adding n bytes takes n gamma.

The ring's all-reduce is the reduce-scatter and all-gather of Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009): every rank sends 2 (N - 1) / N of the
buffer, for any N. Each segment is summed along one chain of ranks and then passed on, so all ranks
get identical bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from pybackend.core.collective.links import Arrived, Call, Link
from pybackend.core.collective.wire import (
    BLOCK,
    CHUNK,
    Array,
    Compression,
    split_chunks,
    view_bytes,
)

Segments = Sequence[Sequence[slice]]


def count_pairs(world_size: int) -> int:
    # The ranks that are folded, so that a power of two remains.
    return world_size - (1 << (world_size.bit_length() - 1))


def find_partners(rank: int, world_size: int) -> list[int]:
    """Find the ranks that a rank exchanges its sum with in each round; none for a folded rank."""
    pairs = count_pairs(world_size)
    if rank < 2 * pairs and rank % 2:
        return []
    position = rank // 2 if rank < 2 * pairs else rank - pairs
    others = [position ^ 1 << turn for turn in range(world_size.bit_length() - 1)]
    return [2 * other if other < pairs else other + pairs for other in others]


def find_neighbours(rank: int, world_size: int) -> Sequence[int]:
    """Find the ranks to which a rank is connected: on the ring, and for recursive doubling."""
    ring = {(rank - 1) % world_size, (rank + 1) % world_size}
    return sorted(ring | set(find_partners(rank, world_size)))


@dataclass(frozen=True)
class Ranks:
    """Ranks that sum among themselves: this one's rank there, their number, and links by rank.

    All methods use the ring, except `double`. ``scratch_of`` returns memory of a number of bytes,
    the same in each call.
    """

    rank: int
    world_size: int
    links: Mapping[int, Link]
    scratch_of: Callable[[int], Array]

    def among(self, ranks: Sequence[int]) -> Ranks:
        """Return the group of some of the ranks, which are counted again from 0."""
        rank = ranks.index(self.rank)
        links = {other: self.links[ranks[other]] for other in find_neighbours(rank, len(ranks))}
        return Ranks(rank, len(ranks), links, self.scratch_of)

    def double(self, call: Call, buffer: Array) -> None:
        """Sum in place by recursive doubling."""
        rank, links = self.rank, self.links
        received = self.scratch_of(buffer.nbytes).view(buffer.dtype)
        ours, theirs = [view_bytes(buffer)], [view_bytes(received)]
        is_folded = rank < 2 * count_pairs(self.world_size)
        if is_folded and rank % 2:
            call.flow(links[rank - 1], ours, None, [])
            call.flow(None, [], links[rank - 1], ours)
            return
        if is_folded:
            call.flow(None, [], links[rank + 1], theirs)
            np.add(buffer, received, out=buffer)
        for partner in find_partners(rank, self.world_size):
            call.flow(links[partner], ours, links[partner], theirs)
            # The order of the terms affects the bits of NaNs.
            first, second = (buffer, received) if rank < partner else (received, buffer)
            np.add(first, second, out=buffer)
        if is_folded:
            call.flow(links[rank + 1], ours, None, [])

    @property
    def _before(self) -> Link:
        return self.links[(self.rank - 1) % self.world_size]

    @property
    def _after(self) -> Link:
        return self.links[(self.rank + 1) % self.world_size]

    def all_reduce(self, call: Call, buffer: Array) -> None:
        """Sum in place. Each chunk is added when it is received, and sent on when it is added."""
        segments = self._cut(len(buffer), CHUNK // buffer.itemsize)
        self._flow(call, buffer, segments, self._adding(buffer, segments))

    def reduce_scatter(self, call: Call, buffer: Array, parts: Sequence[slice]) -> None:
        """Sum this rank's part in place: the first half of `all_reduce`, with parts of any size.

        The other parts of the buffer then have partial sums.
        """
        step = CHUNK // buffer.itemsize
        # A rank completes the last segment that it receives, which is its own part.
        order = [parts[(self.rank - turn - 1) % self.world_size] for turn in range(self.world_size)]
        segments = [_split(part.start, part.stop, step) for part in order]
        self._flow(call, buffer, segments, self._adding(buffer, segments), is_half=True)

    def all_reduce_coded(self, call: Call, buffer: Array, codec: Compression, error: Array) -> None:
        """Sum in place like `all_reduce`, with data sent in half precision and float32 sums.

        The rank that completes a segment also rounds its own copy. ``error`` has that of
        each element.
        """
        wire = codec.wire(len(buffer))
        segments = self._cut(len(buffer), BLOCK)
        summed, final = list(chain(*segments[1:])), list(chain(*segments[:-1]))
        received = self.scratch_of(CHUNK).view(wire.dtype)
        for span in segments[0]:
            codec.encode(buffer[span], wire[span], error[span])

        def use(index: int) -> None:
            if index < len(summed):
                span = summed[index]
                codec.add(received[: span.stop - span.start], buffer[span])
                codec.encode(buffer[span], wire[span], error[span])
            else:
                span = final[index - len(summed)]
                codec.decode(wire[span], buffer[span])

        self._flow(call, wire, segments, use)

    def _adding(self, buffer: Array, segments: Segments) -> Callable[[int], None]:
        """Return a function that adds the data that have arrived."""
        summed = list(chain(*segments[1:]))
        received = self.scratch_of(CHUNK).view(buffer.dtype)

        def add(index: int) -> None:
            if index < len(summed):
                part = buffer[summed[index]]
                np.add(part, received[: len(part)], out=part)

        return add

    def _flow(
        self, call: Call, buffer: Array, segments: Segments, arrived: Arrived, is_half: bool = False
    ) -> None:
        """Send and receive segments in both rounds of `all_reduce`, or in the first one only.

        Data of the first round arrive in memory, because they are added to the buffer. They
        are sent next, so what is received and sent is cut at the same positions.
        """
        raw, size = view_bytes(buffer), buffer.itemsize
        starts = [slice(0, span.stop - span.start) for span in chain(*segments[1:])]
        incoming, sent = _slice_views(self.scratch_of(CHUNK).data, size, starts), segments[:-1]
        if not is_half:
            incoming += _slice_views(raw, size, chain(*segments[:-1]))
            sent = [*segments, *segments[:-2]]
        outgoing, ready = _slice_views(raw, size, chain(*sent)), len(segments[0])
        call.flow(self._after, outgoing, self._before, incoming, ready=ready, arrived=arrived)

    def all_gather(self, call: Call, parts: Sequence[Array]) -> None:
        """Fill the arrays of all other ranks with the data that these ranks send."""
        order = [(self.rank - step) % self.world_size for step in range(self.world_size)]
        pieces = [split_chunks(view_bytes(parts[rank])) for rank in order]
        outgoing, incoming = list(chain(*pieces[:-1])), list(chain(*pieces[1:]))
        call.flow(self._after, outgoing, self._before, incoming, ready=len(pieces[0]))

    def pass_on(self, call: Call, raw: memoryview, first: int, last: int) -> None:
        """Pass the first rank's bytes on along the ring up to the last one; others do nothing."""
        size = self.world_size
        if (self.rank - first) % size > (last - first) % size:
            return
        pieces = split_chunks(raw)
        before = None if self.rank == first else self._before
        after = None if self.rank == last else self._after
        call.flow(after, pieces, before, pieces, ready=0 if before else len(pieces))

    def _cut(self, length: int, step: int) -> list[list[slice]]:
        """Cut a buffer into segments, and these into spans of ``step`` elements, in sending order.

        In the first round this rank sends all segments but the last, and receives and adds all but
        the first; then the last one is complete. In the second round it sends the last one and then
        all but the last two, and receives all but the last.
        """
        size = self.world_size
        turns = [(self.rank - turn) % size for turn in range(size)]
        return [_split(length * k // size, length * (k + 1) // size, step) for k in turns]


def _slice_views(raw: memoryview, itemsize: int, spans: Iterable[slice]) -> list[memoryview]:
    return [raw[span.start * itemsize : span.stop * itemsize] for span in spans]


def _split(start: int, stop: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]


Algorithm = Literal["ring", "doubling", "shared"]

_MESSAGE = 1 << 20
_TINY_ROUNDS = 12
_LARGE_ROUNDS = 3


@dataclass(frozen=True)
class CostModel:
    """Prediction of how many seconds an all-reduce takes, from algorithm, bytes and ranks."""

    latency_seconds: float  # alpha: for an exchange of tiny messages between two ranks
    seconds_per_byte: float  # beta: for an exchange that sends as much as it receives
    add_seconds_per_byte: float  # gamma: for adding one buffer to another

    def predict_ring(self, nbytes: float, world_size: int) -> float:
        """Predict reduce-scatter and all-gather: many rounds, each sending 1 / N of the buffer."""
        others = world_size - 1
        moved = 2 * self.seconds_per_byte + self.add_seconds_per_byte
        return 2 * others * self.latency_seconds + others / world_size * nbytes * moved

    def predict_doubling(self, nbytes: float, world_size: int) -> float:
        """Predict recursive doubling: few rounds, each sending the whole buffer."""
        message = self.latency_seconds + nbytes * self.seconds_per_byte
        add = nbytes * self.add_seconds_per_byte
        rounds = world_size.bit_length() - 1
        fold = 2 * message + add if count_pairs(world_size) else 0.0
        return rounds * (message + add) + fold

    def choose(self, nbytes: float, world_size: int, ring_bytes: float | None = None) -> Algorithm:
        """Choose the algorithm that is predicted to be faster.

        ``ring_bytes`` is the number of bytes that a ring would send, if it differs from ``nbytes``.
        """
        ring = self.predict_ring(nbytes if ring_bytes is None else ring_bytes, world_size)
        return "doubling" if self.predict_doubling(nbytes, world_size) <= ring else "ring"


# Guess for a network of 10 gigabits per second.
TEN_GIGABITS = CostModel(25e-6, 0.8e-9, 0.1e-9)


def measure(doubling: Callable[[Array], None], world_size: int) -> CostModel:
    """Measure the three values and agree on their means; all ranks must call this together.

    ``doubling`` is an all-reduce by recursive doubling, over at least 2 ranks.
    """
    rounds = world_size.bit_length() - 1 + (2 if count_pairs(world_size) else 0)
    tiny, large = np.zeros(1), np.zeros(_MESSAGE // 4, np.float32)
    other = np.zeros_like(large)
    latency = _time_fastest(lambda: doubling(tiny), _TINY_ROUNDS) / rounds
    add = _time_fastest(lambda: np.add(large, other, out=large), _LARGE_ROUNDS) / _MESSAGE
    message = _time_fastest(lambda: doubling(large), _LARGE_ROUNDS) / rounds
    # At most a terabyte per second, even if the clock measures more.
    values = np.array([latency, max((message - latency) / _MESSAGE - add, 1e-12), add])
    # All ranks must choose the same algorithm, so all use the same values.
    doubling(values)
    return CostModel(*(values / world_size).tolist())


def _time_fastest(work: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)  # noise only slows runs down
