"""All-reduce by recursive doubling: few rounds, each with the whole buffer.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(2005). Where the number of ranks is no power of two, the first ranks fold in pairs before and
unfold after. Both ranks of a pair add the same two sums in the same order, so all ranks hold the
very same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pybackend.collective.links import Array, Call, Link, bytes_of


def folded(world_size: int) -> int:
    """How many pairs of ranks fold, so that a power of two is left."""
    return world_size - (1 << (world_size.bit_length() - 1))


def partners(rank: int, world_size: int) -> list[int]:
    """The ranks with which a rank exchanges its sum, round by round; none where it folds."""
    pairs = folded(world_size)
    if rank < 2 * pairs and rank % 2:
        return []
    place = rank // 2 if rank < 2 * pairs else rank - pairs
    others = [place ^ 1 << turn for turn in range(world_size.bit_length() - 1)]
    return [2 * other if other < pairs else other + pairs for other in others]


def all_reduce(
    call: Call, links: Mapping[int, Link], rank: int, world_size: int, buffer: Array, scratch: Array
) -> None:
    """Sum in place. ``scratch`` has room for the buffer's bytes."""
    received = scratch[: buffer.nbytes].view(buffer.dtype)
    ours, theirs = [bytes_of(buffer)], [bytes_of(received)]
    folds = rank < 2 * folded(world_size)
    if folds and rank % 2:
        call.flow(links[rank - 1], ours, None, [])
        call.flow(None, [], links[rank - 1], ours)
        return
    if folds:
        call.flow(None, [], links[rank + 1], theirs)
        np.add(buffer, received, out=buffer)
    for partner in partners(rank, world_size):
        call.flow(links[partner], ours, links[partner], theirs)
        # The order of the terms shows in the bits of NaNs.
        first, second = (buffer, received) if rank < partner else (received, buffer)
        np.add(first, second, out=buffer)
    if folds:
        call.flow(links[rank + 1], ours, None, [])
