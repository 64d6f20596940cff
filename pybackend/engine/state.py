"""Weights, optimizer state and randomness of a model, made equal or compared over the workers."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from pybackend.collective import Collective
from pybackend.errors import InputError
from pybackend.model.compare import is_random_state
from pybackend.model.layers import find_optimizers
from pybackend.model.structure import digest_model

# Odd and large: it spreads the ranks over the seeds of the random generators.
_RANK_STRIDE = 0x9E3779B1


def broadcast_state(model: Any, collective: Collective) -> None:
    """Give every rank the weights and the optimizer state of rank 0."""
    optimizers = find_optimizers(model)
    states = [variable for optimizer in optimizers for variable in optimizer.variables]
    for variable in [*model.weights, *states]:
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


def check_structure(model: Any, collective: Collective) -> None:
    """Refuse models that differ from rank to rank, each of which has built its own.

    Raises
    ------
    InputError
        On every rank.
    """
    own = np.frombuffer(digest_model(model).encode(), np.uint8).copy()
    everyone = [part.tobytes().decode() for part in collective.all_gather(own)]
    differing = [rank for rank, digest in enumerate(everyone) if digest != everyone[0]]
    if differing:
        raise InputError(
            f"the model of worker {', '.join(map(str, differing))} has another structure, or was "
            "compiled otherwise, than that of worker 0: the `model` function must build the same "
            "model on all workers"
        )


def find_statistics(model: Any) -> list[Any]:
    """Weights that forward passes update, averaged over the workers after each epoch."""
    return [v for v in model.non_trainable_weights if "float" in str(v.dtype)]


def find_trained(model: Any) -> tuple[int, ...]:
    """Places of the trained weights among all; a callback may freeze and thaw layers."""
    trained = {id(v) for v in model.trainable_weights}
    return tuple(n for n, v in enumerate(model.weights) if id(v) in trained)


def find_differing_weights(model: Any, collective: Collective) -> dict[int, str]:
    """Ranks whose weights are not those of rank 0, and the first that is not; equal on every rank.

    By a checksum of each weight (CRC-32).
    """
    weights = model.weights
    own = [zlib.crc32(np.ascontiguousarray(v.numpy()).tobytes()) for v in weights]
    everyone = collective.all_gather(np.array(own, np.int64))
    found = {}
    for rank, sums in enumerate(everyone):
        differs = np.flatnonzero(sums != everyone[0]) if len(sums) == len(own) else [0]
        if len(differs):
            found[rank] = str(weights[int(differs[0])].path)
    return found
