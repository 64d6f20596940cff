"""What each worker reports when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pybackend.errors import Failure


@dataclass(frozen=True)
class WorkerReport:
    """What one worker did.

    Attributes
    ----------
    rank, host, pid
        Which process it was.
    rows
        Rows of its shard: each is used exactly once per epoch, unless ``steps_per_epoch`` ends
        the epochs earlier.
    steps
        Optimizer steps taken.
    seconds
        Wall time of the training itself, without start-up.
    waited
        Of these the seconds in which it waited for other workers (training); None if that is not
        known: TensorFlow's own collectives do not tell.
    value
        What the function returned (`barrier_run`), or the history (training).
    weights_sha256
        Digest of the final weights, equal on all ranks after a training.
    model_sha256
        Digest of the model file, on the rank that wrote it.
    inputs
        Shape and type of each input of a row, nested as the model has them (training).
    failure
        None if the worker succeeded.
    """

    rank: int
    host: str
    pid: int
    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    waited: float | None = None
    value: Any = None
    weights_sha256: str | None = None
    model_sha256: str | None = None
    inputs: Any = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether the worker succeeded."""
        return self.failure is None
