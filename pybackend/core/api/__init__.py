"""The calls of users: what they check, encode, run and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class TrainingHook(Protocol):
    """Changes the training calls of this process, for a package that stands on the core.

    Each method may raise an `InputError`. ``call`` is a `TrainingCall`, ``request`` the `Request`
    that was made of it, and ``result`` its `TrainResult`.
    """

    def resolve(self, call: Any) -> Any:
        """Return the call to make instead, with its number of workers already known."""

    def check(self, request: Any) -> None:
        """Check what was made of the call, before anything is started."""

    def note(self, request: Any, result: Any) -> None:
        """Take note of the result, which the call returns afterwards."""

    def check_submission(self, call: Any) -> None:
        """Check that another process may drive the training, where there are no hooks."""


hooks: dict[str, Callable[[], TrainingHook | None]] = {}
"""Functions that return the hooks by name, or None, so that registering one loads nothing."""


def training_hooks() -> list[TrainingHook]:
    return [hook for find in hooks.values() if (hook := find()) is not None]
