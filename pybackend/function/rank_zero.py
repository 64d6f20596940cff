"""Calls of functions without a `WorkerContext`, which return only the value of rank 0."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.context import WorkerContext

_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class RankZero:
    """Call a function without a `WorkerContext`, and return its value on rank 0.

    Attributes
    ----------
    fn
        The function.
    gpus
        Number of GPUs of all workers together, divided as evenly as possible; None: each worker
        uses all GPUs that it was given.
    chosen
        GPUs of a single worker.
    is_mirrored
        Whether it is called in the scope of a ``MultiWorkerMirroredStrategy``.
    """

    fn: Callable[..., Any]
    gpus: int | None = None
    chosen: tuple[str, ...] | None = None
    is_mirrored: bool = False

    def __call__(self, context: WorkerContext, /, *args: Any, **kwargs: Any) -> Any:
        """Return the function's value on rank 0, None elsewhere."""
        if self.chosen is not None:
            os.environ[_GPUS] = ",".join(self.chosen)
        elif self.gpus is not None:
            os.environ[_GPUS] = ",".join(_share(self.gpus, context))
        call = _call_mirrored if self.is_mirrored else _call
        value = call(self.fn, args, kwargs)
        return value if context.rank == 0 else None


def _share(gpus: int, context: WorkerContext) -> list[str]:
    """Return this worker's share of the GPUs, from those that it was given."""
    wanted = gpus // context.world_size + (context.rank < gpus % context.world_size)
    given = [gpu for gpu in os.environ.get(_GPUS, "").split(",") if gpu]
    if wanted > len(given):
        raise ClusterError(
            f"worker {context.rank} needs {wanted} GPUs, but its task was given {len(given)}: "
            "set spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount"
        )
    return given[:wanted]


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def _call_mirrored(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    tf: Any = importlib.import_module("tensorflow")
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        return fn(*args, **kwargs)
