"""What a launcher gives back, and how it tells a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pybackend.errors import WorkerFailedError, root_cause_first
from pybackend.job.report import WorkerReport


@dataclass(frozen=True)
class Outcome:
    """Reports by rank, and format and content of the model that rank 0 wrote."""

    reports: list[WorkerReport]
    model: tuple[str, bytes] | None = None


def raise_first_failure(reports: Sequence[WorkerReport]) -> None:
    """Raise `WorkerFailedError` where any worker failed, the first by time as the cause."""
    failures = [r.failure for r in reports if r.failure is not None]
    if failures:
        raise WorkerFailedError(root_cause_first(failures))
