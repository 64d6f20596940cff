"""The calls of users: what they check, encode, run and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pybackend.core.api.calls import TrainingCall
    from pybackend.core.api.request import Request
    from pybackend.core.api.train_result import TrainResult
    from pybackend.core.job.job import TrainingJob


class TrainingHook(Protocol):
    """Changes the training calls of this process, for a package that stands on the core.

    Each method may raise an `InputError`.
    """

    def resolve(self, call: TrainingCall) -> TrainingCall:
        """Return the call to make instead, with its number of workers already known."""

    def check(self, request: Request[TrainingJob]) -> None:
        """Check what was made of the call, before anything is started."""

    def note(self, request: Request[TrainingJob], result: TrainResult) -> None:
        """Take note of the result, which the call returns afterwards."""

    def check_submission(self, call: TrainingCall) -> None:
        """Check that another process may drive the training, where there are no hooks."""


hooks: list[Callable[[], TrainingHook]] = []
"""Functions that return the hooks, so that registering one loads nothing."""


def training_hooks() -> list[TrainingHook]:
    return [find() for find in hooks]
