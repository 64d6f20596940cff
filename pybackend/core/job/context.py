"""Context of a worker for functions that `barrier_run` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.value_codec import decode_value, encode_value
from pybackend.core.words import term

Gather = Callable[[str, str], list[str]]
Announce = Callable[[str, str], object]


@dataclass(frozen=True)
class WorkerContext:
    """Worker that runs a function of `barrier_run`; the function's first argument.

    Attributes
    ----------
    rank, world_size
        Rank of this worker, from 0, and the number of workers.
    addresses
        ``host:port`` of every worker, by rank. Each port is reserved for its worker: TensorFlow can
        bind it, and processes of other users cannot take it.
    tf_config
        The TF_CONFIG text, which is also in the environment variable of that name.
    role, index
        ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``, and this worker's index within its
        role. Without ``roles``, every worker is a ``"worker"`` and its index is its rank.
    """

    rank: int
    world_size: int
    addresses: tuple[str, ...]
    tf_config: str
    role: str = "worker"
    index: int = -1
    _gather: Gather | None = field(default=None, repr=False, compare=False)
    _source: Any = field(default=None, repr=False, compare=False)
    _announce: Announce | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.index < 0:
            object.__setattr__(self, "index", self.rank)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank. All must call it the same number of times.

        Parameters
        ----------
        value
            Any value that a function of `barrier_run` may return.

        Raises
        ------
        PeerLostError
            A worker was lost.
        ClusterError
            A worker has returned, or is in a different call.
        SerializationError
            The value cannot be sent.
        """
        return list(map(decode_value, self.gather("all_gather", encode_value(value))))

    def barrier(self) -> None:
        """Wait until all workers have called this method. Raises the errors of `all_gather`."""
        self.gather("barrier", "")

    def gather(self, call: str, text: str) -> list[str]:
        """Return the texts of all workers, by rank, if all workers make the call with this name."""
        if self._gather is None:
            raise ClusterError(f"only functions that `{term('barrier_run')}` runs can share values")
        return self._gather(call, text)

    def feed(self, batch_size: int = 32) -> Iterator[Mapping[str, Any]]:
        """Iterate over this worker's rows, each row once.

        Parameters
        ----------
        batch_size
            Maximum rows per batch. The last batch may have fewer.

        Yields
        ------
        dict
            Maps each column name to a numpy array with one entry per row of the batch.

        Raises
        ------
        InputError
            The call that runs the function has no ``data``.
        """
        if self._source is None:
            raise InputError(
                "there are no rows to feed: the call that runs this function has no `data`"
            )
        # Not a generator: this must raise its error in the call, not at the first row.
        batches: Iterator[Mapping[str, Any]] = self._source.batches(batch_size)
        return batches

    @property
    def source(self) -> Any:
        """Source of this worker's rows; None without ``data``."""
        return self._source

    def announce(self, name: str, text: str) -> None:
        """Send a message to the driver's listeners. Nothing is printed."""
        if self._announce is not None:
            self._announce(name, text)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and the methods by name."""
        named = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        calls = {"all_gather": self.all_gather, "barrier": self.barrier, "feed": self.feed}
        return {**named, **calls}

    def __getstate__(self) -> dict[str, Any]:
        # Other processes have no connection.
        return {**vars(self), "_gather": None, "_source": None, "_announce": None}
