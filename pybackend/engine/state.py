"""Weights, optimizer state and randomness of a model, made equal or compared over the workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from pybackend.collective import Collective, all_sum
from pybackend.model.compare import hash_weights, is_random_state

# Odd and large: it spreads the ranks over the seeds of the random generators.
_RANK_STRIDE = 0x9E3779B1


def broadcast_state(model: Any, collective: Collective) -> None:
    """Give every rank the weights and the optimizer state of rank 0."""
    for variable in [*model.weights, *model.optimizer.variables]:
        value = np.array(variable.numpy(), order="C")
        if value.dtype.kind in "fiub" or value.dtype.name == "bfloat16":
            collective.broadcast(value.reshape(-1))
            variable.assign(value)


def offset_seeds(model: Any, rank: int) -> None:
    """Give each rank its own dropout masks, although all start from one saved model."""
    for variable in model.variables:
        if is_random_state(variable):
            state = np.array(variable.numpy())
            state[0] = (int(state[0]) + rank * _RANK_STRIDE) % 2**31
            variable.assign(state)


def find_differing_ranks(model: Any, collective: Collective) -> list[int]:
    """Ranks whose weights are not bitwise those of rank 0; the same answer on every rank."""
    own = np.frombuffer(bytes.fromhex(hash_weights(model)), np.uint8)
    reference = own.copy()
    collective.broadcast(reference)
    differs = np.zeros(collective.world_size)
    differs[collective.rank] = not np.array_equal(own, reference)
    return np.flatnonzero(all_sum(collective, differs)).tolist()
