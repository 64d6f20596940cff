"""Rows of a step, packed for the rank that audits it, and their order on that rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from pybackend.core.data.arrays import nest
from pybackend.core.data.sharding import order_sharded
from pybackend.core.words import show

Array = npt.NDArray[Any]


class UnequalRows(Exception):
    """Rows of several workers that cannot form a batch, e.g. because they differ in shape."""


@dataclass(frozen=True)
class GlobalRows:
    """Rows of all workers at one step.

    Attributes
    ----------
    batch
        ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of arrays, as in a single process.
    parts
        Positions of each worker's rows in the batch, by rank.
    """

    batch: Any
    parts: list[Array]

    @property
    def counts(self) -> Array:
        """Number of rows of each worker."""
        return np.array([len(part) for part in self.parts])

    def turned(self) -> GlobalRows:
        """Return the same rows in another order."""
        order = np.random.default_rng(0).permutation(sum(self.counts))
        batch = keras.tree.map_structure(lambda column: column[order], self.batch)
        return GlobalRows(batch, [np.argsort(order)[part] for part in self.parts])

    def of_rank(self, rank: int) -> GlobalRows:
        """Return the rows of one worker."""
        part = self.parts[rank]
        batch = keras.tree.map_structure(lambda column: column[part], self.batch)
        return GlobalRows(batch, [np.arange(len(part))])


def pack_rows(columns: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Pack one worker's rows of a step.

    Parameters
    ----------
    first
        Position of the first one among the worker's own rows, in the order in which it uses them.
    """
    packed = {name: np.asarray(column) for name, column in columns.items()}
    return {"first": first, "columns": packed}


def unpack_rows(everyone: Sequence[Mapping[str, Any]], is_sharded: bool) -> GlobalRows:
    """Unpack the rows from `pack_rows` of each rank into one batch.

    Parameters
    ----------
    is_sharded
        True if consecutive rows of the batch belong to consecutive ranks; else the rows are
        listed rank by rank.

    Raises
    ------
    UnequalRows
        The rows of the workers differ in shape.
    """
    columns = [part["columns"] for part in everyone]
    counts = [len(next(iter(one.values()))) for one in columns]
    with_rows = [one for one, count in zip(columns, counts, strict=True) if count]
    ranks = np.repeat(np.arange(len(counts)), counts)
    if not with_rows:
        raise UnequalRows("no worker can read the rows of the step again")
    firsts = [one["first"] for one in everyone]
    order = order_sharded(firsts, counts) if is_sharded else np.arange(len(ranks))
    shapes = {name: {one[name].shape[1:] for one in with_rows} for name in columns[0]}
    for name, found in shapes.items():
        if len(found) > 1:
            raise UnequalRows(f"rows of {show(name)} have different shapes on different workers")
    joined = {name: np.concatenate([one[name] for one in with_rows])[order] for name in shapes}
    parts = [np.flatnonzero(ranks[order] == rank) for rank in range(len(counts))]
    return GlobalRows(nest(joined), parts)
