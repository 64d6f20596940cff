"""Sums through the memory of each host, and between hosts over connections.

If several hosts have several ranks, the ranks of a host reduce in memory, each one part of the
buffer. Then each rank sums its part with the ranks that have the same part on other hosts, and the
ranks of a host copy the parts from memory. So each of H hosts sends 2 (H - 1) / H of the buffer,
over as many connections as there are parts. A ring over all N ranks sends 2 (N - 1) / N of it from
host to host, over one connection, or several times that if the ranks of a host are not neighbors.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pybackend.core.collective import algorithms
from pybackend.core.collective.algorithms import TEN_GIGABITS, Ring, find_neighbours
from pybackend.core.collective.call import Call
from pybackend.core.collective.links import Link
from pybackend.core.collective.shared import SharedMemory
from pybackend.core.collective.wire import CHUNK, Array, Compression


@dataclass(frozen=True)
class Layout:
    """The ranks with which one rank sums, in the order of the terms.

    Attributes
    ----------
    local
        The ranks of its host.
    across
        One rank per host, which sum the same part of a buffer; empty if it sums no part.
    hosts, parts
        Number of hosts, and of parts of a buffer; the same on all ranks.
    """

    local: tuple[int, ...]
    across: tuple[int, ...]
    hosts: int
    parts: int

    def find_neighbours(self, rank: int) -> set[int]:
        """Find the ranks to which a rank needs connections."""
        groups = [group for group in (self.local, self.across) if len(group) > 1]
        return {
            group[place]
            for group in groups
            for place in find_neighbours(group.index(rank), len(group))
        }


def find_layout(hosts: Sequence[str], rank: int) -> Layout | None:
    """Find the ranks with which a rank sums, from the host of each rank.

    Returns
    -------
    Layout or None
        None if a host has only one rank, or less than half as many as another host: few ranks
        would sum all parts there.
    """
    by_host: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    groups = list(by_host.values())
    parts, most = min(map(len, groups)), max(map(len, groups))
    if parts == 1 or parts * 2 < most:
        return None
    local = by_host[hosts[rank]]
    place = local.index(rank)
    across = tuple(group[place] for group in groups) if place < parts else ()
    return Layout(tuple(local), across, len(groups), parts)


class HostSum:
    """Sum over all ranks, of which those of a host share memory.

    Parameters
    ----------
    memory
        Mapped by all ranks of this host.
    links
        Links to the ranks that ``layout`` needs.
    """

    def __init__(
        self, memory: mmap.mmap, layout: Layout, rank: int, links: Mapping[int, Link]
    ) -> None:
        self.layout = layout
        self._memory = SharedMemory(memory, layout.local.index(rank), len(layout.local))
        self._local = _Subgroup.of(layout.local, rank, links)
        is_across = layout.hosts > 1 and bool(layout.across)
        self._across = _Subgroup.of(layout.across, rank, links) if is_across else None

    def reduce_parts(self, call: Call, buffer: Array, parts: Sequence[slice]) -> None:
        """Sum this rank's part of a 1-D buffer in place; only for ranks of one host."""
        self._memory.reduce_parts(partial(self._meet, call), buffer, parts)

    def gather_parts(self, call: Call, buffer: Array, parts: Sequence[slice]) -> None:
        """Fill the parts of the other ranks; only for ranks of one host."""
        self._memory.gather_parts(partial(self._meet, call), buffer, parts)

    def _meet(self, call: Call) -> None:
        nothing = np.empty(0, np.uint8)
        self._local.double(call, nothing, nothing)

    def all_reduce(
        self,
        call: Call,
        buffer: Array,
        scratch_of: Callable[[int], Array],
        codec: Compression | None = None,
    ) -> None:
        """Sum a 1-D buffer in place.

        The ranks of a host are added in their order, and then the hosts, by an algorithm that
        depends only on the number of bytes and hosts.

        Parameters
        ----------
        scratch_of
            Returns memory of a number of bytes.
        codec
            Compression of what is sent between hosts; with one host, there is nothing to compress.
        """
        meet = partial(self._meet, call)
        if self.layout.hosts == 1:
            self._memory.all_reduce(meet, buffer)
            return
        span = self._memory.reduce_scatter(meet, buffer, self.layout.parts)
        part = buffer[span]
        if self._across and codec:
            residual = codec.residual(len(buffer))[span]
            self._across.ring.all_reduce_coded(call, part, scratch_of(CHUNK), codec, residual)
        # All parts share the network, so each is as slow as the whole buffer.
        elif self._across and TEN_GIGABITS.choose(buffer.nbytes, self.layout.hosts) == "ring":
            self._across.ring.all_reduce(call, part, scratch_of(CHUNK))
        elif self._across:
            self._across.double(call, part, scratch_of(part.nbytes))
        self._memory.all_gather(meet, buffer, self.layout.parts)


@dataclass(frozen=True)
class _Subgroup:
    """Ranks that sum among themselves; this one's position, and its links by position."""

    position: int
    size: int
    links: Mapping[int, Link]

    @classmethod
    def of(cls, ranks: Sequence[int], rank: int, links: Mapping[int, Link]) -> _Subgroup:
        """Select the links to ranks of the subgroup."""
        position = ranks.index(rank)
        places = find_neighbours(position, len(ranks))
        return cls(position, len(ranks), {place: links[ranks[place]] for place in places})

    def double(self, call: Call, buffer: Array, scratch: Array) -> None:
        """Sum in place by recursive doubling; ``scratch`` has as many bytes as the buffer."""
        algorithms.all_reduce(call, self.links, self.position, self.size, buffer, scratch)

    @property
    def ring(self) -> Ring:
        """Return the ring of these ranks."""
        before, after = (self.position - 1) % self.size, (self.position + 1) % self.size
        return Ring(self.position, self.size, self.links[before], self.links[after])
