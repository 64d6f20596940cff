"""Collectives of NumPy buffers over links, each with the algorithm predicted to be faster."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np

from pybackend.core.collective.algorithms import TEN_GIGABITS, Algorithm, Ranks, measure
from pybackend.core.collective.host_memory import (
    NO_OFFER,
    HostLayout,
    HostSum,
    offer_memory,
    open_memory,
)
from pybackend.core.collective.links import Call, Link, Patience
from pybackend.core.collective.wire import CHUNK, Array, Compression, Terms, view_bytes
from pybackend.core.errors import ClusterError, InputError

_CODECS: dict[str | None, int] = {None: 0, "fp16": 1, "bf16": 2}
# Most bytes in memory of data that a rank forwards to the one that gathers.
_BLOCK = 8 << 20
USUAL_BUCKET, _BUCKET_SECONDS = 25e6, 0.02


class Mesh:
    """Connections of one rank to the others. Not thread-safe: one collective at a time.

    All ranks call the same methods in the same order, with buffers of the same type and size; each
    call checks that and raises a `ClusterError`. Any method raises `PeerLostError`: immediately if
    a peer closes its connection, after its link's timeout if its machine does not answer, and after
    ``patience.longest`` if it does not join the call. After an error, a mesh can only be closed.

    ``links`` has a link to each rank that `find_neighbours` returns, and to those of ``layout``:
    ranks that try, at the first large sum, whether they can share memory; None on all ranks or on
    none. ``patience`` is how long this rank waits for peers. The ``algorithm`` "auto" is the one
    that `cost_model`, measured and the same on all ranks, predicts to be faster; the others are for
    tests and benchmarks.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        rank: int,
        world_size: int,
        algorithm: Literal["auto"] | Algorithm = "auto",
        patience: Patience | None = None,
        layout: HostLayout | None = None,
    ) -> None:
        self.rank, self.world_size, self.algorithm = rank, world_size, algorithm
        self.cost_model = TEN_GIGABITS  # until `calibrate` measures
        self.links = dict(links)
        self._patience = patience or Patience()
        self._count = 0
        self.scratch = np.empty(CHUNK, np.uint8)
        self._everyone = Ranks(rank, world_size, self.links, self._scratch_of)
        self.shared: HostSum | None = None
        self._layout = layout
        self._has_one_host = layout is not None and layout.hosts == 1

    @property
    def waited(self) -> float:
        return self._patience.waited

    @property
    def route(self) -> str:
        """The route of large sums: shared memory, sockets, encrypted sockets, or two of these."""
        is_protected = any(link.stream.is_protected for link in self.links.values())
        sockets = "encrypted sockets" if is_protected else "sockets"
        if self.shared is None:
            return sockets
        return f"shared memory and {sockets}" if self.shared.layout.hosts > 1 else "shared memory"

    def all_reduce(
        self, buffer: Array, codec: Compression | None = None, terms: Terms | None = None
    ) -> None:
        """Replace a contiguous buffer with its sum over all ranks, bit-identical on all.

        It may have any shape, and any type that NumPy can add. ``codec`` compresses to half
        precision, for float32 only. Small buffers, for which the number of rounds matters more than
        the bytes, are not compressed. With ``terms``, this rank's terms are what that function
        writes: into memory that ranks share, if they share any, so they are written once.
        """
        self._check(buffer)
        buffer = buffer.reshape(-1)
        if codec and buffer.dtype != np.float32:
            raise InputError(f"compression needs a float32 buffer, not a {buffer.dtype} one")
        on_the_wire = len(buffer) * codec.itemsize if codec else buffer.nbytes
        algorithm = self._choose_sum(on_the_wire, buffer.nbytes, codec is not None)
        # A sum that overflows is infinite, which the engine and Keras's callbacks detect.
        with np.errstate(over="ignore", invalid="ignore"):
            coded = _CODECS[codec.kind if codec else None]
            kind = b"m" if algorithm == "shared" else b"+"
            call = self._call(kind, buffer.dtype, buffer.nbytes, coded)
            if self.shared and algorithm == "shared":
                self.shared.all_reduce(call, buffer, codec, terms)
                return
            if terms:
                terms(0, buffer)
            if algorithm == "doubling":
                if codec:
                    codec.repay(buffer)
                self._everyone.double(call, buffer)
            elif codec:
                self._everyone.all_reduce_coded(call, buffer, codec, codec.residual(len(buffer)))
            else:
                self._everyone.all_reduce(call, buffer)

    def reduce_scatter(self, buffer: Array, ends: Sequence[int]) -> None:
        """Replace this rank's part of a contiguous 1-D buffer with its sum over all ranks.

        The other parts are undefined afterwards. The terms have the same order as in `all_reduce`,
        except on a ring. ``ends`` has where each rank's part ends, in elements; the first begins at
        0.
        """
        self._check(buffer)
        parts, detail = _cut_at(ends)
        algorithm = self._choose_sum(buffer.nbytes, buffer.nbytes, False)
        if algorithm == "shared" and not self._is_one_host:
            algorithm = self._choose(buffer.nbytes, buffer.nbytes)
        call = self._call(b"s", buffer.dtype, buffer.nbytes, detail)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.shared and algorithm == "shared":
                self.shared.reduce_scatter(call, buffer, parts)
            elif algorithm == "doubling":
                self._everyone.double(call, buffer)
            else:
                self._everyone.reduce_scatter(call, buffer, parts)

    def gather_parts(self, buffer: Array, ends: Sequence[int]) -> None:
        """Fill the other ranks' parts of a contiguous 1-D buffer with the data of these ranks.

        ``ends`` is as in `reduce_scatter`; together, the two send as much as an `all_reduce`.
        """
        self._check(buffer)
        parts, detail = _cut_at(ends)
        call = self._call(b"p", buffer.dtype, buffer.nbytes, detail)
        if self.shared and self._is_one_host and buffer.nbytes > CHUNK:
            self.shared.all_gather(call, buffer, parts)
        elif self._choose(buffer.nbytes / 2, buffer.nbytes) == "ring":
            self._everyone.all_gather(call, [buffer[part] for part in parts])
        else:
            raw, own = buffer.view(np.uint8), parts[self.rank]
            raw[: own.start * buffer.itemsize] = 0
            raw[own.stop * buffer.itemsize :] = 0
            self._everyone.double(call, raw)

    def all_gather(self, part: Array) -> list[Array]:
        """Collect every rank's array, in rank order.

        ``part`` is contiguous, with at least one dimension; the first may differ between ranks, and
        be 0. The returned list contains this array itself.
        """
        self._check(part)
        row = int(np.prod(part.shape[1:], dtype=np.int64)) * part.itemsize
        lengths = np.zeros(self.world_size, np.int64)
        lengths[self.rank] = len(part)
        # The shape of a row is in the header: bytes alone do not distinguish (2, 3) from (3, 2).
        shape = zlib.crc32(repr(part.shape[1:]).encode()) >> 1
        self._everyone.double(self._call(b"g", part.dtype, row, shape), lengths)
        parts = self._make_parts(part, lengths)
        total = sum(map(int, lengths)) * row
        call = self._call(b"G", part.dtype, total)
        if self._choose(total / 2, total) == "ring":
            self._everyone.all_gather(call, parts)
            return parts
        # Each rank's bytes at their position and zeros elsewhere: the sum joins them.
        ends = np.cumsum(lengths) * row
        together = np.zeros(total, np.uint8)
        together[ends[self.rank] - part.nbytes : ends[self.rank]] = view_bytes(part)
        self._everyone.double(call, together)
        for rank, array in enumerate(parts):
            if rank != self.rank:
                view_bytes(array)[:] = together[ends[rank] - array.nbytes : ends[rank]].data
        return parts

    def gather(self, part: Array, root: int = 0) -> list[Array]:
        """Collect every rank's array at rank ``root``, in rank order; an empty list elsewhere.

        The other ranks hold at most one block of the forwarded data in memory. ``part`` is
        contiguous and 1-D; lengths may differ. The list contains this array itself.
        """
        self._check(part, root)
        lengths = np.zeros(self.world_size, np.int64)
        lengths[self.rank] = len(part)
        self._everyone.double(self._call(b"h", part.dtype, part.itemsize, root), lengths)
        is_root = self.rank == root
        parts = self._make_parts(part, lengths if is_root else np.zeros_like(lengths))
        for turn in range(1, self.world_size):
            source = (root - turn) % self.world_size
            total = int(lengths[source]) * part.itemsize
            has_it = is_root or self.rank == source
            for start in range(0, total, _BLOCK):
                stop = min(start + _BLOCK, total)
                call = self._call(b"r", part.dtype, stop - start, source)
                whole = view_bytes(parts[source]) if has_it else None
                block = whole[start:stop] if whole else self._scratch_of(stop - start).data
                self._everyone.pass_on(call, block, source, root)
        return parts if is_root else []

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Replace a contiguous buffer of any shape with that of rank ``root``."""
        self._check(buffer, root)
        call = self._call(b"=", buffer.dtype, buffer.nbytes, root)
        if self._choose(buffer.nbytes / 2, buffer.nbytes) == "ring":
            self._everyone.pass_on(call, view_bytes(buffer), root, (root - 1) % self.world_size)
            return
        # The bytes of one rank plus the zeros of all others.
        mine = buffer.reshape(-1).view(np.uint8) if buffer.size else np.empty(0, np.uint8)
        if self.rank != root:
            mine[:] = 0
        self._everyone.double(call, mine)

    def close(self) -> None:
        self.shared = None
        for link in self.links.values():
            link.close()

    def choose_bucket_bytes(self, has_idle: bool) -> float:
        """Choose how many bytes of gradients to send at a time while others are computed.

        All ranks must call this together. ``has_idle`` is true on a rank that could send without
        taking time from computing. If none of one host's ranks can, all is sent at the end.
        """
        idle = np.array([has_idle], np.int64)
        self.all_reduce(idle)
        if self._has_one_host and not idle[0]:
            return float("inf")
        if self._has_one_host or self.world_size > 2:
            # What a ring adds first depends on it, so two runs with one seed would differ.
            return USUAL_BUCKET
        return min(max(_BUCKET_SECONDS / self.cost_model.seconds_per_byte, 1e6), 64e6)

    def calibrate(self) -> None:
        """Measure ``cost_model``; all ranks must call this together."""

        def double(buffer: Array) -> None:
            self._everyone.double(self._call(b"+", buffer.dtype, buffer.nbytes), buffer)

        self.cost_model = measure(double, self.world_size)

    def _can_share(self, is_coded: bool) -> bool:
        """Return whether to use memory; compression is for data that is sent to other hosts."""
        if self._layout and not (is_coded and self._layout.hosts == 1):
            self._share_memory(self._layout)
        return self.shared is not None and not (is_coded and self.shared.layout.hosts == 1)

    def _share_memory(self, layout: HostLayout) -> None:
        """Use memory that the ranks of each host share, if all can; all must call this together."""
        self._layout = None  # tried once, also by the sums below
        first, count = layout.local[0], len(layout.local)
        with ExitStack() as until:
            local = [link for rank, link in self.links.items() if rank in layout.local]
            is_open = not any(link.stream.is_protected for link in local)
            offer, memory = NO_OFFER, None
            if self.rank == first and is_open:
                offer, memory = offer_memory(count, until)
            offers = self.all_gather(np.frombuffer(offer, np.uint8))
            if self.rank != first and is_open:
                memory = open_memory(offers[first].tobytes(), count)
            able = np.array([memory is not None], np.int64)
            self.all_reduce(able)
        if memory is None or able[0] < self.world_size:
            return
        self.shared = HostSum(memory, layout, self._everyone)

    def _make_parts(self, part: Array, lengths: Array) -> list[Array]:
        """Allocate every rank's array, with the announced length; this rank's is ``part``."""
        try:
            parts = [np.empty((int(length), *part.shape[1:]), part.dtype) for length in lengths]
        except (ValueError, MemoryError) as error:
            raise ClusterError(
                f"worker {self.rank} has too little memory for the data of the workers: they "
                f"announced {lengths.tolist()} rows of {part.dtype}{part.shape[1:]} ({error})"
            ) from error
        parts[self.rank] = part
        return parts

    def _check(self, buffer: Array, root: int = 0) -> None:
        # reshape() would silently copy any other array, and the sum would be lost.
        if not buffer.flags.c_contiguous or buffer.ndim == 0:
            raise InputError("a collective needs a contiguous array with at least one dimension")
        if not 0 <= root < self.world_size:
            raise InputError(f"root must be a rank below {self.world_size}, not {root}")

    @property
    def _is_one_host(self) -> bool:
        return self.shared is not None and self.shared.layout.hosts == 1

    def _choose_sum(self, ring_bytes: float, nbytes: float, is_coded: bool) -> Algorithm:
        # A fixed size, not a prediction: the order of the terms must be the same in every run.
        is_large = nbytes > CHUNK and self.algorithm == "auto"
        if (is_large or self.algorithm == "shared") and self._can_share(is_coded):
            return "shared"
        return self._choose(ring_bytes, nbytes)

    def _choose(self, ring_bytes: float, doubling_bytes: float) -> Algorithm:
        if self.algorithm in ("ring", "doubling"):
            return self.algorithm
        return self.cost_model.choose(doubling_bytes, self.world_size, ring_bytes)

    def _call(self, kind: bytes, dtype: np.dtype[Any], size: int, detail: int = 0) -> Call:
        self._count += 1
        header = self._count, kind, dtype.str.encode()[-3:], detail, size
        return Call(self.rank, self.links.values(), self._patience, header)

    def _scratch_of(self, size: int) -> Array:
        if self.scratch.size < size:
            self.scratch = np.empty(size, np.uint8)
        return self.scratch[:size]


def _cut_at(ends: Sequence[int]) -> tuple[list[slice], int]:
    """Return the ranks' parts of a buffer, and a number for the header that differs if they do."""
    parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return parts, zlib.crc32(repr([*map(int, ends)]).encode()) >> 1
