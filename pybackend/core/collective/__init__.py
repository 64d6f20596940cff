"""Sums, gathers and broadcasts over the workers of a job, behind one small interface.

Start with `mesh.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pybackend.core.collective.algorithms import CostModel
from pybackend.core.collective.joining import join_mesh
from pybackend.core.collective.links import LONGEST_SECONDS, Patience
from pybackend.core.collective.mesh import Mesh
from pybackend.core.collective.wire import Array, Compression, Terms
from pybackend.core.job.value_codec import decode_state, encode_state

__all__ = ["LONGEST_SECONDS", "Compression", "CostModel", "Mesh", "Patience", "Terms", "join_mesh"]


class Collective(Protocol):
    """Interface of a transport. All ranks call the same methods in the same order."""

    rank: int
    world_size: int

    @property
    def waited(self) -> float:
        """Total seconds that this rank has waited for others."""

    def all_reduce(
        self, buffer: Array, codec: Compression | None = None, terms: Terms | None = None
    ) -> None:
        """Replace a contiguous 1-D buffer with its sum over all ranks, bit-identical on all.

        With ``terms``, a rank's terms are what this function writes, not what the buffer has.
        """

    def reduce_scatter(self, buffer: Array, ends: Sequence[int]) -> None:
        """Replace this rank's part of a 1-D buffer with its sum; ``ends`` has all parts' ends."""

    def gather_parts(self, buffer: Array, ends: Sequence[int]) -> None:
        """Fill the other ranks' parts of a 1-D buffer with the data of these ranks."""

    def all_gather(self, part: Array) -> list[Array]:
        """Collect every rank's contiguous array, in rank order; first dimensions may differ."""

    def gather(self, part: Array, root: int = 0) -> list[Array]:
        """Collect every rank's 1-D array at rank ``root`` only; return an empty list elsewhere."""

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Replace a contiguous buffer with that of rank ``root``."""

    def close(self) -> None:
        """Close the connections."""


class Alone:
    """Collective of a single worker, which exchanges nothing."""

    rank = 0
    world_size = 1
    waited = 0.0

    def all_reduce(
        self, buffer: Array, codec: Compression | None = None, terms: Terms | None = None
    ) -> None:
        """Leave the buffer unchanged, or write the terms: with one rank, they are the sum."""
        if terms:
            terms(0, buffer)

    def reduce_scatter(self, buffer: Array, ends: Sequence[int]) -> None:
        """Leave the buffer unchanged."""

    def gather_parts(self, buffer: Array, ends: Sequence[int]) -> None:
        """Leave the buffer unchanged."""

    def all_gather(self, part: Array) -> list[Array]:
        """Return the only array."""
        return [part]

    def gather(self, part: Array, root: int = 0) -> list[Array]:
        """Return the only array."""
        return [part]

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Leave the buffer unchanged."""

    def close(self) -> None:
        """Do nothing: there are no connections."""


def all_sum(collective: Collective, values: Any, dtype: str = "float64") -> Array:
    """Sum a few numbers over all ranks; return an array with the shape of ``values``."""
    array = np.array(values, dtype=dtype)
    flat = np.ascontiguousarray(array).reshape(-1)
    collective.all_reduce(flat)
    return flat.reshape(array.shape)


def is_true_anywhere(collective: Collective, value: bool) -> bool:
    """Return on all ranks whether a value is true on any of them."""
    return bool(all_sum(collective, [value])[0])


def all_gather_values(collective: Collective, value: Any) -> list[Any]:
    """Return the values of all ranks, as `pybackend.core.job.value_codec` encodes them."""
    return list(map(decode_state, collective.all_gather(_to_array(encode_state(value)))))


def gather_values(collective: Collective, value: Any) -> list[Any]:
    """Return the values of all ranks on rank 0, and nothing elsewhere."""
    return list(map(decode_state, collective.gather(_to_array(encode_state(value)))))


def broadcast_value(collective: Collective, value: Any, root: int = 0) -> Any:
    """Return the value of one rank on all ranks; the values of others are ignored."""
    own = encode_state(value) if collective.rank == root else b""
    return decode_state(broadcast_bytes(collective, own, root))


def broadcast_bytes(collective: Collective, content: bytes, root: int = 0) -> bytes:
    """Return the content of one rank on all ranks; the content of others is ignored."""
    size = np.array([len(content)], np.int64)
    collective.broadcast(size, root)
    is_root = collective.rank == root
    received = _to_array(content) if is_root else np.zeros(int(size[0]), np.uint8)
    collective.broadcast(received, root)
    return received.tobytes()


def _to_array(content: bytes) -> Array:
    return np.frombuffer(content, np.uint8).copy()
