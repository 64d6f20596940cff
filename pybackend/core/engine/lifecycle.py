"""Start and end of training, and the state saved in between.

`Lifecycle` saves nothing. `engine.resume` has the lifecycle with checkpoints, `engine.elastic` that
of an elastic training run. `train` and `fit` call the methods of whichever is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from pybackend.core.engine.replica import Replica
from pybackend.core.engine.state import (
    broadcast_state,
    check_structure,
    find_differing_weights,
    offset_seeds,
)
from pybackend.core.engine.sync import EpochSync, Preemption
from pybackend.core.engine.synchronizer import Synchronizer
from pybackend.core.engine.validation import build_metrics
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Note
from pybackend.core.job.report import Audit, Generation


@dataclass(frozen=True)
class Start:
    """Start of a training run: after ``epoch`` epochs, and ``step`` steps of the next.

    ``state`` is None if training is not resumed. ``generations`` are those before, if it resumes an
    elastic training run. ``audit`` has the results of the audits before.
    """

    epoch: int
    step: int = 0
    is_stopped: bool = False
    state: Any = None
    generations: tuple[Generation, ...] = ()
    audit: Audit | None = None

    @property
    def is_within_epoch(self) -> bool:
        """True if training resumes partway through an epoch."""
        return self.step > 0


class Lifecycle:
    """Lifecycle of a training run that saves no state before it ends.

    Attributes
    ----------
    start
        Start of training; known after `begin`.
    audit
        Result of the audits, which are added to it.
    preemption
        How workers leave before the end, or None if they may not.
    """

    preemption: Preemption | None = None

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.start = Start(job.initial_epoch)
        self.audit = Audit()

    def seed(self, rank: int) -> None:
        """Seed random numbers differently on each rank."""
        keras.utils.set_random_seed((self.job.seed + rank) % 2**32)

    def begin(self, replica: Replica) -> None:
        """Determine where training begins, and prepare the replica for it."""

    def share_state(self, replica: Replica) -> None:
        """Send rank 0's weights and optimizer state to all ranks."""
        if replica.collective.world_size > 1:
            _compare_first_weights(replica)
            offset_seeds(replica.model, replica.collective.rank)
            broadcast_state(replica.view, replica.collective)

    def make_callbacks(
        self, replica: Replica, sync: EpochSync, synchronizer: Synchronizer
    ) -> list[Any]:
        """Return the callbacks that restore and save the state; Keras calls them last."""
        return []

    def finish(self) -> None:
        """Save what the last callbacks changed, and wait until everything is saved."""

    def close(self, replica: Replica) -> Callable[[], None] | None:
        """End after rank 0 has written the model; return a function that cleans up, or None."""
        return None


def share_first_weights(replica: Replica) -> None:
    """Send rank 0's weights to all ranks, which already have their own random numbers."""
    _compare_first_weights(replica)
    broadcast_state(replica.view, replica.collective)


def wait_for_all(replica: Replica) -> None:
    """Wait until rank 0 has written the model: until then another rank can take its place."""
    replica.collective.all_gather(np.zeros(1, np.int8))


def build_what_is_restored(replica: Replica) -> None:
    """Create the variables of the metrics, and the test function, before the first step."""
    build_metrics(replica.model, replica.rows)
    replica.model.make_test_function(force=True)


def _compare_first_weights(replica: Replica) -> None:
    """Report weights that differ between ranks; raise `InputError` if their shapes differ."""
    check_structure(replica.model, replica.collective)
    differing = find_differing_weights(replica.model, replica.collective)
    if differing:
        text = (
            f"the initial weights of worker {', '.join(map(str, differing))} differed from those "
            "of worker 0 (seeded by rank?): all workers start with those of worker 0"
        )
        replica.emit(Note(text))
