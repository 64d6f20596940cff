"""Memory that all ranks share if they run on one host; sums go through it instead of sockets.

The memory is a Linux memfd, which has no name: nothing is left of it when the last rank ends, even
by SIGKILL, and the limit on /dev/shm in containers does not apply. The other ranks open it through
rank 0's folder in /proc, which only works for the same user on the same host.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from pybackend.collective.wire import Array

# Bytes of a buffer that are summed at a time: few enough to stay in the cache.
_SLOT = 1 << 21
# The slots of many ranks are smaller.
_MOST = 64 << 20
_NAME = "tfdist"
_NONCE = 32
_OFFER = struct.Struct(f"=qq{_NONCE}s")
NO_OFFER = bytes(_OFFER.size)


class SharedMemory:
    """Memory of all ranks of a host, with two slots for each rank, used in turn.

    While some ranks still read one slot, the others already write to their other one. Two ranks
    compute the same sum, so both must treat subnormal numbers alike, as in recursive doubling.

    Parameters
    ----------
    memory
        Mapped by all ranks.
    """

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int) -> None:
        whole = np.frombuffer(memory, np.uint8)[mmap.PAGESIZE :]
        self._slots = whole.reshape(2, world_size, _size_of_slot(world_size))
        self._turn = 0
        self._rank = rank

    def all_reduce(self, meet: Callable[[], None], buffer: Array) -> None:
        """Sum in place, in the order of the ranks.

        Parameters
        ----------
        meet
            Returns once all ranks have called it.
        """
        step = self._slots.shape[2] // buffer.itemsize
        for start in range(0, len(buffer) or 1, step):
            part = buffer[start : start + step]
            slots = [slot[: part.nbytes].view(part.dtype) for slot in self._slots[self._turn]]
            self._turn = 1 - self._turn
            slots[self._rank][:] = part
            meet()
            if len(slots) == 2:
                np.add(slots[0], slots[1], out=part)
            else:
                self._sum_by_parts(meet, slots, part)

    def _sum_by_parts(self, meet: Callable[[], None], slots: list[Array], part: Array) -> None:
        """Let each rank sum one part of a buffer, which the others then copy."""
        ends = [len(part) * k // len(slots) for k in range(len(slots) + 1)]
        spans = [slice(*ends[k : k + 2]) for k in range(len(slots))]
        own = spans[self._rank]
        total = part[own]
        np.add(slots[0][own], slots[1][own], out=total)
        for slot in slots[2:]:
            np.add(total, slot[own], out=total)
        slots[self._rank][own] = total
        meet()
        for rank, span in enumerate(spans):
            if rank != self._rank:
                part[span] = slots[rank][span]


def offer_memory(world_size: int, until: ExitStack) -> tuple[bytes, mmap.mmap | None]:
    """Allocate memory on rank 0, which the other ranks must open before ``until`` is closed.

    Returns
    -------
    tuple
        What `open_memory` needs, and the memory; `NO_OFFER` and None if the system has none.
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
    """Map the memory that rank 0 offers; None if this process cannot, as in another container."""
    pid, descriptor, nonce = _OFFER.unpack(offer)
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # another process's file
            return None
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap.mmap(own, _size_of(world_size))
    except (OSError, ValueError):  # it is shorter
        return None
    finally:
        os.close(own)
    return memory if memory[:_NONCE] == nonce else None


def _size_of(world_size: int) -> int:
    return mmap.PAGESIZE + 2 * world_size * _size_of_slot(world_size)


def _size_of_slot(world_size: int) -> int:
    return min(_SLOT, _MOST // (2 * world_size) // mmap.PAGESIZE * mmap.PAGESIZE)
