"""Make weights, optimizer state and random states equal on all workers, or compare them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_gather_values, is_true_anywhere
from pybackend.core.data.checkpoint_checks import digest_text
from pybackend.core.errors import InputError
from pybackend.core.model.compare import is_random_state
from pybackend.core.model.compile_settings import describe_structure
from pybackend.core.model.view import ModelView

# The state of these is each worker's own.
_EACH_WORKERS = (tf.random.Generator, keras.random.SeedGenerator, keras.metrics.Metric)
# Largest relative change of a weight by the rounding errors of an epoch.
_DRIFT = 1e-3
# Odd and large: it spreads the ranks over the seeds of the random generators.
_RANK_STRIDE = 0x9E3779B1


def broadcast_state(view: ModelView, collective: Collective) -> None:
    for variable in [*view.model.weights, *view.optimizer_variables]:
        value = np.array(variable.numpy(), order="C")
        # Text has no fixed size; NumPy's kind of bfloat16 is that of raw bytes.
        if value.dtype.kind in "fiub" or value.dtype.name == "bfloat16":
            collective.broadcast(value.reshape(-1))
            variable.assign(value)


def offset_seeds(model: Any, rank: int) -> None:
    """Give each rank its own dropout masks, even though all start from the same saved model."""
    for variable in model.variables:
        if is_random_state(variable):
            state = np.array(variable.numpy())
            state[0] = (int(state[0]) + rank * _RANK_STRIDE) % 2**31
            variable.assign(state)


def check_structure(model: Any, collective: Collective) -> None:
    """Raise `InputError` on all ranks if the models that they built differ in structure."""
    everyone = all_gather_values(collective, digest_text(describe_structure(model)))
    differing = [rank for rank, digest in enumerate(everyone) if digest != everyone[0]]
    if differing:
        raise InputError(
            f"the model of worker {', '.join(map(str, differing))} has a different structure, or "
            "was compiled differently, than that of worker 0: the `model` function must build the "
            "same model on all workers"
        )


def find_statistics(model: Any) -> list[Any]:
    """Return variables that forward passes update, such as averages and counters."""
    return [v for v in model.non_trainable_weights if str(v.dtype) not in ("bool", "string")]


def find_other_state(view: ModelView) -> list[Any]:
    """Return TensorFlow variables in custom objects and closures, which Keras does not track."""
    model = view.model
    listed = [*model.variables, *model.metrics_variables, *view.optimizer_variables]
    known = {id(v.value) for v in listed}
    found = [v for v in view.list_variables(without=_EACH_WORKERS) if id(v) not in known]
    return [v for v in found if v.dtype.is_floating or v.dtype.is_integer]


def find_trained(model: Any) -> tuple[int, ...]:
    """Return the positions of the trained weights; a callback may freeze and unfreeze layers."""
    trained = {id(v) for v in model.trainable_weights}
    return tuple(n for n, v in enumerate(model.weights) if id(v) in trained)


def find_differing_weights(
    model: Any, collective: Collective, others: Sequence[Any] = ()
) -> dict[int, str]:
    """Find, on all ranks, which ranks' weights differ from rank 0's, and the first such weight.

    Weights, and ``others``, are compared by checksums (CRC-32).
    """
    return find_differing([*model.weights, *others], collective)[0]


def undo_drift(
    model: Any, collective: Collective, is_sharded: bool = False
) -> tuple[dict[int, str], float]:
    """Send rank 0's weights and optimizer state to all ranks, if they differ only by rounding.

    If the optimizer's state is sharded, there is nothing of it that could differ. GPUs add up the
    gradients of an embedding row in any order, and choose the fastest way to compute a sum, so two
    GPUs that take the same step may differ in the last digits.

    Returns the result of `find_differing_weights` for weights that differ by more than rounding,
    and the largest difference, relative to a variable's norm.
    """
    variables = [*model.weights, *([] if is_sharded else ModelView(model).optimizer_variables)]
    found, indices = find_differing(variables, collective)
    largest, is_other = 0.0, False
    for index in indices:
        own = np.array(variables[index].numpy(), order="C")
        first = own.copy()
        collective.broadcast(first.reshape(-1))
        distance = _measure(own, first)
        variables[index].assign(first)
        if index < len(model.weights):
            largest, is_other = max(largest, distance), is_other or not distance <= _DRIFT
    seen = is_true_anywhere(collective, is_other)
    largest = max(part[0] for part in collective.all_gather(np.array([largest])))
    return (found if seen else {}), float(largest)


def _measure(own: Any, first: Any) -> float:
    one, other = own.astype(np.float64), first.astype(np.float64)
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    distance = np.linalg.norm(np.subtract(one, other, where=~is_same, out=np.zeros_like(one)))
    size = np.linalg.norm(other)
    return float(distance / size) if distance and size else (np.inf if distance else 0.0)


def find_differing(
    variables: Sequence[Any], collective: Collective
) -> tuple[dict[int, str], list[int]]:
    """Return ranks that differ from rank 0, with the first such variable, and all positions."""
    own = [zlib.crc32(np.ascontiguousarray(v.numpy()).tobytes()) for v in variables]
    everyone = collective.all_gather(np.array(own, np.int64))
    differing = {
        rank: np.flatnonzero(sums != everyone[0]).tolist() if len(sums) == len(own) else [0]
        for rank, sums in enumerate(everyone)
    }
    found = {rank: str(variables[one[0]].path) for rank, one in differing.items() if one}
    return found, sorted({index for one in differing.values() for index in one})


def uses_gpus(collective: Collective) -> bool:
    """Return whether any worker has a GPU; the same on all workers."""
    return is_true_anywhere(collective, bool(tf.config.list_logical_devices("GPU")))
