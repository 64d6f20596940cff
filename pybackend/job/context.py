"""What a function that `barrier_run` runs knows about its worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerContext:
    """One worker among the others; the first argument of the function.

    Attributes
    ----------
    rank, world_size
        This worker's number, from 0, and how many there are.
    addresses
        ``host:port`` of every worker, by rank. Each port is reserved for its worker: TensorFlow
        can bind it, no other user's process can take it.
    tf_config
        The TF_CONFIG text; the environment variable of that name holds it too.
    role, index
        ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``, and this worker's number among those
        of its role. Without ``roles`` all are workers, and the number is the rank.
    """

    rank: int
    world_size: int
    addresses: tuple[str, ...]
    tf_config: str
    role: str = "worker"
    index: int = -1

    def __post_init__(self) -> None:
        if self.index < 0:
            object.__setattr__(self, "index", self.rank)
