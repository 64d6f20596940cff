"""Sums gradients of large embedding tables over the workers without making them dense."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.collective import Collective

Array = npt.NDArray[Any]

# A table of fewer elements travels dense, with the other gradients: that is cheaper.
LARGE_TABLE = 1 << 20


def combined(indices: Array, values: Array) -> tuple[Array, Array]:
    """Add up the rows of ``values`` that share an index; indices come back sorted.

    Parameters
    ----------
    indices
        Shape (n,), whole numbers.
    values
        Shape (n, ...).
    """
    if not len(indices):
        return indices, values
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return ordered[starts], np.add.reduceat(values[order], starts, axis=0)


def all_combined(collective: Collective, indices: Array, values: Array) -> tuple[Array, Array]:
    """The sum over all workers, as sorted indices and rows; the same bits on each.

    Each worker sends only the rows that its own batch has touched.
    """
    own = combined(indices, values)
    everyone = [collective.all_gather(np.ascontiguousarray(part)) for part in own]
    return combined(*(np.concatenate(parts) for parts in everyone))
