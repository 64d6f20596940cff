"""What a function that `barrier_run` runs knows about its worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.values import decode_value, encode_value

Gather = Callable[[str, str], list[str]]


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
    _gather: Gather | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.index < 0:
            object.__setattr__(self, "index", self.rank)

    def all_gather(self, value: Any) -> list[Any]:
        """Give every worker the values of all, by rank. All workers call it, as often as others.

        Parameters
        ----------
        value
            What a function of `barrier_run` may return.

        Raises
        ------
        PeerLostError
            A worker was lost.
        ClusterError
            A worker has returned, or is at another call.
        SerializationError
            The value cannot be sent.
        """
        return list(map(decode_value, self.gather("all_gather", encode_value(value))))

    def barrier(self) -> None:
        """Wait until all workers have called it. Errors are those of `all_gather`."""
        self.gather("barrier", "")

    def gather(self, call: str, text: str) -> list[str]:
        """The texts of all workers, by rank, if all make the same call, of this name."""
        if self._gather is None:
            raise ClusterError("only functions that `barrier_run` runs can share values")
        return self._gather(call, text)

    def to_dict(self) -> dict[str, Any]:
        """What the attributes say, and the two calls, by name."""
        named = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**named, "all_gather": self.all_gather, "barrier": self.barrier}

    def __getstate__(self) -> dict[str, Any]:
        # Other processes have no connection.
        return {**vars(self), "_gather": None}
