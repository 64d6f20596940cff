"""Gradients of embeddings over the workers: the rows that their batches touched, never a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.collective import Collective

Array = npt.NDArray[Any]


def gather_slices(collective: Collective, indices: Array, values: Array) -> tuple[Array, Array]:
    """All workers' rows one after the other, in the order of the ranks.

    Rows of one index are not added up: Keras's optimizers take each by itself (a square in Adam, a
    norm in clipping), so that is what equals a single process.

    Parameters
    ----------
    indices
        Shape (n,), whole numbers; n differs between the workers.
    values
        Shape (n, ...).
    """
    everyone = [collective.all_gather(np.ascontiguousarray(part)) for part in (indices, values)]
    all_indices, all_values = (np.concatenate(parts) for parts in everyone)
    return all_indices, all_values
