"""How a training begins, what is saved of it on the way, and how it ends.

`Lifecycle` saves nothing. `engine.resume` has the one with checkpoints, `engine.elastic` the one of
an elastic training. `train` and `fit` call their methods, and need not know which one they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pybackend.engine.held_out import build_metrics
from pybackend.engine.leaving import Leaving
from pybackend.engine.replica import Replica
from pybackend.engine.state import (
    broadcast_state,
    check_structure,
    find_differing_weights,
    offset_seeds,
)
from pybackend.engine.sync import EpochSync
from pybackend.engine.synchronizer import Synchronizer
from pybackend.job.job import TrainingJob
from pybackend.job.messages import Note
from pybackend.job.report import Audit
from pybackend.model.load import LoadedModel, load_job_model


@dataclass(frozen=True)
class Start:
    """Where a training begins: after ``epoch`` epochs, and ``step`` steps of the next.

    ``state`` is None if it begins at its beginning.
    """

    epoch: int
    step: int = 0
    is_stopped: bool = False
    state: Any = None

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch was begun."""
        return self.step > 0


class Lifecycle:
    """A training of which nothing is saved on the way.

    Attributes
    ----------
    start
        Where it begins; known after `begin`.
    audit
        The report of audits that is continued, or None.
    leaving
        How workers leave before the end, or None if none may.
    """

    audit: Audit | None = None
    leaving: Leaving | None = None

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.start = Start(job.initial_epoch)

    def load_model(self, folder: Path) -> LoadedModel:
        """The model and the callbacks that the driver has sent to the folder."""
        return load_job_model(self.job, folder)

    def seed(self, rank: int) -> None:
        """Make what is random from here on differ from rank to rank."""
        keras.utils.set_random_seed((self.job.seed + rank) % 2**32)

    def begin(self, replica: Replica) -> None:
        """Find out where the training begins, and prepare the replica for it."""

    def share_state(self, replica: Replica) -> None:
        """Give all ranks rank 0's weights and optimizer state."""
        if replica.collective.world_size > 1:
            _compare_first_weights(replica)
            offset_seeds(replica.model, replica.collective.rank)
            broadcast_state(replica.model, replica.collective)

    def make_callbacks(
        self, replica: Replica, sync: EpochSync, synchronizer: Synchronizer
    ) -> list[Any]:
        """The callbacks that restore and save the state; Keras calls them after all others."""
        return []

    def finish(self) -> None:
        """Save what the last callbacks have changed, and wait until all is saved."""

    def close(self, replica: Replica) -> Callable[[], None] | None:
        """End, once rank 0 has written the model; returns what removes what is of no more use."""
        return None


def share_first_weights(replica: Replica) -> None:
    """As `Lifecycle.share_state`, for replicas with random numbers of their own."""
    _compare_first_weights(replica)
    broadcast_state(replica.model, replica.collective)


def wait_for_all(replica: Replica) -> None:
    """Wait until rank 0 has written the model: until then the others can replace it."""
    replica.collective.all_gather(np.zeros(1, np.int8))


def build_what_is_restored(replica: Replica) -> None:
    """Make the variables of the metrics, and the test function, before the first step."""
    build_metrics(replica.model, replica.rows)
    replica.model.make_test_function(force=True)


def _compare_first_weights(replica: Replica) -> None:
    """Report if the ranks' weights are not equal; `InputError` if their shapes are not."""
    check_structure(replica.model, replica.collective)
    differing = find_differing_weights(replica.model, replica.collective)
    if differing:
        text = (
            f"the first weights of worker {', '.join(map(str, differing))} differed from those of "
            "worker 0 (seeded by rank?): all start from worker 0's"
        )
        replica.emit(Note(text))
