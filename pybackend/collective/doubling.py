"""All-reduce by recursive doubling: few rounds, each with the whole buffer.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(2005). If the number of ranks is not a power of two, the first ranks are folded in pairs before,
and unfolded after. Both ranks of an exchange add the same two sums in the same order, so all ranks
get identical bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pybackend.collective.buffers import Array, view_bytes
from pybackend.collective.call import Call
from pybackend.collective.links import Link


def count_pairs(world_size: int) -> int:
    """Count the pairs of ranks that are folded so that a power of two remains."""
    return world_size - (1 << (world_size.bit_length() - 1))


def find_partners(rank: int, world_size: int) -> list[int]:
    """Find the ranks with which a rank exchanges its sum, by round; none for a folded rank."""
    pairs = count_pairs(world_size)
    if rank < 2 * pairs and rank % 2:
        return []
    position = rank // 2 if rank < 2 * pairs else rank - pairs
    others = [position ^ 1 << turn for turn in range(world_size.bit_length() - 1)]
    return [2 * other if other < pairs else other + pairs for other in others]


def all_reduce(
    call: Call, links: Mapping[int, Link], rank: int, world_size: int, buffer: Array, scratch: Array
) -> None:
    """Sum in place. ``scratch`` has room for as many bytes as the buffer."""
    received = scratch[: buffer.nbytes].view(buffer.dtype)
    ours, theirs = [view_bytes(buffer)], [view_bytes(received)]
    is_folded = rank < 2 * count_pairs(world_size)
    if is_folded and rank % 2:
        call.flow(links[rank - 1], ours, None, [])
        call.flow(None, [], links[rank - 1], ours)
        return
    if is_folded:
        call.flow(None, [], links[rank + 1], theirs)
        np.add(buffer, received, out=buffer)
    for partner in find_partners(rank, world_size):
        call.flow(links[partner], ours, links[partner], theirs)
        # The order of the terms affects the bits of NaNs.
        first, second = (buffer, received) if rank < partner else (received, buffer)
        np.add(first, second, out=buffer)
    if is_folded:
        call.flow(links[rank + 1], ours, None, [])
