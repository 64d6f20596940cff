"""Gradients of embeddings over the workers: the rows that their batches touched, never a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.collective import Collective

Array = npt.NDArray[Any]


def gather_slices(
    collective: Collective, indices: Array, values: Array, is_shared: bool = False
) -> tuple[Array, Array]:
    """All workers' rows of a table one after the other, in the order of the ranks.

    Rows of one index are not added up: Keras's optimizers take each by itself (a square in Adam, a
    norm in clipping), so that is what equals a single process. But if the indices are no part of
    the rows, as those of positions are, one process has each of them once.

    Parameters
    ----------
    indices
        Shape (n,), whole numbers; n differs between the workers.
    values
        Shape (n, ...).
    is_shared
        The indices do not come from the workers' rows, and those of all workers are added up, if
        they are the same.
    """
    everyone = [collective.all_gather(np.ascontiguousarray(part)) for part in (indices, values)]
    all_indices, all_values = everyone
    if is_shared:
        present = [n for n, own in enumerate(all_indices) if len(own)]
        if all(np.array_equal(all_indices[n], all_indices[present[0]]) for n in present):
            total = np.sum([all_values[n] for n in present], axis=0, dtype=values.dtype)
            return (all_indices[present[0]], total) if present else (indices, values)
    return np.concatenate(all_indices), np.concatenate(all_values)
