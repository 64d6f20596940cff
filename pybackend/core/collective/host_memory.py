"""Sums through the memory of each host, and between hosts over connections.

The memory is a Linux memfd, which has no name: nothing is left of it when the last rank ends, even
by SIGKILL, and the limit on /dev/shm in containers does not apply. The other ranks open it through
the first rank's folder in /proc, which only works for the same user on the same host.

If several hosts have several ranks, the ranks of a host reduce in memory, each one part of the
buffer. Then each rank sums its part with the ranks that have the same part on other hosts, and the
ranks of a host copy the parts from memory. So each of H hosts sends 2 (H - 1) / H of the buffer,
over as many connections as there are parts. A ring over all N ranks sends 2 (N - 1) / N of it from
host to host, over one connection, or several times that if the ranks of a host are not neighbors.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pybackend.core.collective.algorithms import TEN_GIGABITS, Ranks, find_neighbours
from pybackend.core.collective.links import Call
from pybackend.core.collective.wire import Array, Compression, Terms

# Bytes of a buffer that are summed at a time: few enough to stay in the cache.
_SLOT = 1 << 21
# The slots of many ranks are smaller.
_MOST = 64 << 20
_NAME = "tfdist"
_NONCE = 32
# Where the first page has each rank's number of meetings, and the most ranks that have room there.
_COUNTERS, _MOST_RANKS = 64, 500
_OFFER = struct.Struct(f"=qq{_NONCE}s")
NO_OFFER = bytes(_OFFER.size)


def _sum_rows(rows: list[Array], total: Array) -> None:
    np.add(rows[0], rows[1], out=total)
    for row in rows[2:]:
        np.add(total, row, out=total)


def _cut_evenly(length: int, parts: int) -> list[slice]:
    return [slice(length * n // parts, length * (n + 1) // parts) for n in range(parts)]


def _cut_slot(parts: Sequence[slice], size: int) -> list[int]:
    """Return how many elements of each part share a slot, in as few turns as possible.

    The shares are as uneven as the parts: with equal ones, a rank that owns most of a buffer took
    as many times the turns as there are ranks.
    """
    lengths = [part.stop - part.start for part in parts]
    turns = max(1, -(-sum(lengths) // size))
    while sum(-(-length // turns) for length in lengths) > size:
        turns += 1
    return [-(-length // turns) for length in lengths]


def _advance(parts: Sequence[slice], steps: Sequence[int]) -> Iterator[list[slice]]:
    """Yield the next elements of each part, at least once; some may be empty."""
    ends = [part.stop for part in parts]
    starts = [part.start for part in parts]
    while True:
        stops = [min(one + step, end) for one, step, end in zip(starts, steps, ends, strict=True)]
        yield [slice(*pair) for pair in zip(starts, stops, strict=True)]
        if stops == ends:
            return
        starts = stops


def offer_memory(world_size: int, until: ExitStack) -> tuple[bytes, mmap.mmap | None]:
    """Allocate memory on a host's first rank; the others must open it before ``until`` is closed.

    Returns what `open_memory` needs, and the memory; `NO_OFFER` and None if the system has none.
    """
    if not hasattr(os, "memfd_create") or not _size_of_slot(world_size):
        return NO_OFFER, None
    try:
        descriptor = os.memfd_create(_NAME)
        until.callback(os.close, descriptor)
        # Else the system would end the process when it runs out of memory, at the first use.
        os.posix_fallocate(descriptor, 0, _size_of(world_size))
        memory = mmap.mmap(descriptor, 0)
    except OSError:
        return NO_OFFER, None
    nonce = secrets.token_bytes(_NONCE)
    memory[:_NONCE] = nonce
    return _OFFER.pack(os.getpid(), descriptor, nonce), memory


def open_memory(offer: bytes, world_size: int) -> mmap.mmap | None:
    """Map the memory that a host's first rank offers; None if this process cannot see it."""
    pid, descriptor, nonce = _OFFER.unpack(offer)
    path = f"/proc/{pid}/fd/{descriptor}"
    with suppress(OSError, ValueError):  # ValueError: it is shorter
        if os.readlink(path).startswith(f"/memfd:{_NAME}"):  # not another process's file
            with open(path, "r+b", buffering=0) as own:
                memory = mmap.mmap(own.fileno(), _size_of(world_size))
            return memory if memory[:_NONCE] == nonce else None
    return None


def _size_of(world_size: int) -> int:
    return mmap.PAGESIZE + _count_slots(world_size) * world_size * _size_of_slot(world_size)


def _size_of_slot(world_size: int) -> int:
    if world_size > _MOST_RANKS:
        return 0
    most = _MOST // (_count_slots(world_size) * world_size)
    return min(_SLOT, most // mmap.PAGESIZE * mmap.PAGESIZE)


def _count_slots(world_size: int) -> int:
    return 2 if world_size == 2 else 3


@dataclass(frozen=True)
class HostLayout:
    """The ranks with which one rank sums, in the order of the terms."""

    local: tuple[int, ...]  # the ranks of its host
    across: tuple[int, ...]  # one per host, which sum the same part; empty if it sums none
    hosts: int  # this number, and that of the parts of a buffer, are the same on all ranks
    parts: int

    def find_neighbours(self, rank: int) -> set[int]:
        return {
            ranks[position]
            for ranks in [ranks for ranks in (self.local, self.across) if len(ranks) > 1]
            for position in find_neighbours(ranks.index(rank), len(ranks))
        }


def find_layout(hosts: Sequence[str], rank: int) -> HostLayout | None:
    """Find the ranks with which a rank sums, from the host of each rank.

    None if a host has only one rank, or less than half as many as another host: few ranks would sum
    all parts there.
    """
    by_host: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    sizes = list(map(len, by_host.values()))
    parts, most = min(sizes), max(sizes)
    if parts == 1 or parts * 2 < most:
        return None
    local = by_host[hosts[rank]]
    position = local.index(rank)
    across = tuple(ranks[position] for ranks in by_host.values()) if position < parts else ()
    return HostLayout(tuple(local), across, len(sizes), parts)


class HostSum:
    """Sum over all ranks. Those of a host share memory: each has slots, which are used in turn.

    While some ranks still read one slot, the others already write to their next one. Two ranks
    compute the same sum, so both must treat subnormal numbers alike, as in recursive doubling.
    ``everyone`` has the links to the ranks that ``layout`` needs.
    """

    def __init__(self, memory: mmap.mmap, layout: HostLayout, everyone: Ranks) -> None:
        self.layout = layout
        size = len(layout.local)
        whole = np.frombuffer(memory, np.uint8)[mmap.PAGESIZE :]
        self._slots = whole.reshape(_count_slots(size), size, _size_of_slot(size))
        self._arrived = np.frombuffer(memory, np.int64, size, _COUNTERS)
        self._call: Call | None = None
        self._turn, self._meetings = 0, 0
        self._local = everyone.among(layout.local)
        self._rank = self._local.rank
        is_across = layout.hosts > 1 and bool(layout.across)
        self._across = everyone.among(layout.across) if is_across else None

    def all_reduce(
        self, call: Call, buffer: Array, codec: Compression | None, terms: Terms | None = None
    ) -> None:
        """Sum a 1-D buffer in place, or the given ``terms`` into the buffer.

        The ranks of a host are added in their order, and then the hosts, by an algorithm that
        depends only on the number of bytes and hosts. ``codec`` compresses what is sent between
        hosts; with one host, there is nothing to compress.
        """
        if self.layout.hosts == 1:
            self._sum_locally(call, buffer, terms or _reading(buffer))
            return
        parts = _cut_evenly(len(buffer), self.layout.parts)
        self.reduce_scatter(call, buffer, parts, terms)
        if self._across:
            part = buffer[parts[self._rank]]
            if codec:
                residual = codec.residual(len(buffer))[parts[self._rank]]
                self._across.all_reduce_coded(call, part, codec, residual)
            # All parts share the network, so each is as slow as the whole buffer.
            elif TEN_GIGABITS.choose(buffer.nbytes, self.layout.hosts) == "ring":
                self._across.all_reduce(call, part)
            else:
                self._across.double(call, part)
        self.all_gather(call, buffer, parts)

    def _meet(self, call: Call) -> None:
        """Return once all ranks of the host have called it.

        The first meeting of a call compares the headers. The others only count in memory: messages
        between eight ranks on two cores took longer than the sums.
        """
        if call is not self._call:
            self._call = call
            self._local.double(call, np.empty(0, np.uint8))
            return
        self._meetings += 1
        # Python's lock is released and taken, which orders stores and loads on any processor.
        os.sched_yield()
        self._arrived[self._rank] = self._meetings
        call.wait_for(self._find_missing, list(self._local.links.values()))
        os.sched_yield()

    def _find_missing(self) -> list[int]:
        """Return the ranks of this host that have not met as often as this one."""
        behind = np.flatnonzero(self._arrived < self._meetings)
        return [self.layout.local[number] for number in behind]

    def _sum_locally(self, call: Call, buffer: Array, terms: Terms) -> None:
        """Sum in the order of the ranks; only for ranks of one host."""
        step = self._slots.shape[2] // buffer.itemsize
        # Of more than two ranks, each sums a part, which the others copy after the next meeting.
        before: tuple[list[Array], Array] | None = None
        for start in range(0, len(buffer) or 1, step):
            total = buffer[start : start + step]
            slots = [slot[: len(total)] for slot in self._take_turn(buffer.dtype)]
            terms(start, slots[self._rank])
            self._meet(call)
            if before:
                self._copy_parts(*before)
            if len(slots) == 2:
                np.add(slots[0], slots[1], out=total)
            else:
                self._sum_part(slots, total)
                before = slots, total
        if before:
            self._meet(call)
            self._copy_parts(*before)

    def reduce_scatter(
        self, call: Call, buffer: Array, parts: Sequence[slice], terms: Terms | None = None
    ) -> None:
        """Sum this rank's part of a buffer over the ranks of its host in place, in their order.

        The rest is unchanged. Without a part, a rank only contributes terms. ``terms`` are used
        instead of the buffer's.
        """
        terms = terms or _reading(buffer)
        steps = _cut_slot(parts, self._slots.shape[2] // buffer.itemsize)
        starts = [sum(steps[:number]) for number in range(len(parts))]
        for spans in _advance(parts, steps):
            slots = self._take_turn(buffer.dtype)
            for start, span in zip(starts, spans, strict=True):
                terms(span.start, slots[self._rank][start:][: span.stop - span.start])
            self._meet(call)
            if self._rank < len(parts):
                total = buffer[spans[self._rank]]
                _sum_rows([slot[starts[self._rank] :][: len(total)] for slot in slots], total)

    def all_gather(self, call: Call, buffer: Array, parts: Sequence[slice]) -> None:
        """Fill the parts of the other ranks of this host."""
        step = self._slots.shape[2] // buffer.itemsize
        for spans in _advance(parts, [step] * len(parts)):
            slots = self._take_turn(buffer.dtype)
            if self._rank < len(parts):
                own = buffer[spans[self._rank]]
                slots[self._rank][: len(own)] = own
            self._meet(call)
            for rank, span in enumerate(spans):
                if rank != self._rank:
                    buffer[span] = slots[rank][: span.stop - span.start]

    def _take_turn(self, dtype: np.dtype[Any]) -> list[Array]:
        slots = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        usable = slots.shape[1] // dtype.itemsize * dtype.itemsize
        return [slot[:usable].view(dtype) for slot in slots]

    def _sum_part(self, slots: list[Array], total: Array) -> None:
        """Sum this rank's part, and write it to its slot for the others."""
        own = _cut_evenly(len(total), len(slots))[self._rank]
        _sum_rows([slot[own] for slot in slots], total[own])
        slots[self._rank][own] = total[own]

    def _copy_parts(self, slots: list[Array], total: Array) -> None:
        for rank, span in enumerate(_cut_evenly(len(total), len(slots))):
            if rank != self._rank:
                total[span] = slots[rank][span]


def _reading(buffer: Array) -> Terms:
    """Return the terms that a buffer contains."""

    def read(start: int, out: Array) -> None:
        out[:] = buffer[start : start + len(out)]

    return read
