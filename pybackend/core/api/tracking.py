"""Record a training run with trackers: its metrics while it runs, then its result or its error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pybackend.core.api.observer import Tracked
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.result import TrainResult
from pybackend.core.job.messages import Emit, EpochEnded, Event, Note, StepEnded


class Recording:
    """The records of one training run. Errors of a tracking system become notes.

    Parameters
    ----------
    say
        Receives the notes, at most one for each record.
    """

    def __init__(self, say: Emit) -> None:
        self._say = say
        self._records: list[tuple[str, Tracked]] = []
        self._noted: set[str] = set()
        self._seen: dict[int, set[str]] = {}

    def begin(self, prepared: PreparedTraining) -> None:
        """Start the record of each tracker."""
        for tracker in prepared.trackers:
            self._records.append((tracker.system, tracker.begin(prepared)))

    def __call__(self, event: Event) -> None:
        """Record the metrics of an epoch or a step."""
        if not self._records or event.rank != 0:
            return
        if isinstance(event, EpochEnded):
            values = {**list_numbers(event.logs), "epoch_seconds": event.seconds}
            self._seen[event.epoch] = set(values)
            self._log("epoch", event.epoch, values)
        elif isinstance(event, StepEnded):
            values = {f"step/{name}": value for name, value in list_numbers(event.logs).items()}
            if event.seconds > 0:
                values["step/rows_per_second"] = event.rows / event.seconds
            self._log("step", (event.epoch - 1) * event.steps + event.step, values)

    def finish(self, result: TrainResult) -> None:
        """Record the result, with metrics that did not reach this session as events."""
        for epoch, logs in list_epochs(result).items():
            seen = self._seen.get(epoch, ())
            # Those of other callbacks, or all if the workers cannot reach this session.
            if late := {k: v for k, v in list_numbers(logs).items() if k not in seen}:
                self._log("epoch", epoch, late)
        for system, record in self._records:
            self._attempt(system, record.finish, result)

    def fail(self, error: BaseException) -> None:
        """Record the error that ended the training."""
        for system, record in self._records:
            self._attempt(system, record.fail, error)

    def _log(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        for system, record in self._records:
            self._attempt(system, record.log, axis, number, values)

    def _attempt(self, system: str, fn: Any, *arguments: Any) -> None:
        try:
            fn(*arguments)
        except Exception as error:  # hours of training must not end with the tracking server
            if system not in self._noted:
                self._noted.add(system)
                text = f"{system} does not have the whole run: {type(error).__name__}: {error}"
                self._say(Note(text))


@contextmanager
def recording(prepared: PreparedTraining, say: Emit) -> Iterator[Recording]:
    """Record a training run with its trackers. Among processes that join, only the first does.

    Yields
    ------
    Recording
        Receives the events, and the result.
    """
    record = Recording(say)
    try:
        if getattr(prepared.launcher, "is_first", True):
            record.begin(prepared)
        yield record
    except BaseException as error:
        with suppress(KeyboardInterrupt):  # pressed again
            record.fail(error)
        raise


def list_numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers; of a metric with several values, each with its place."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        if isinstance(value, (int, float)):
            found[name] = float(value)
        elif isinstance(value, (list, tuple)):
            found |= list_numbers({f"{name}.{place}": one for place, one in enumerate(value)})
    return found


def list_epochs(result: TrainResult) -> dict[int, dict[str, Any]]:
    """Return the metrics of a result's history by epoch."""
    found: dict[int, dict[str, Any]] = {}
    for name, values in result.history.items():
        for epoch, value in zip(result.epochs_of(name), values, strict=False):
            found.setdefault(epoch, {})[name] = value
    return found
