"""Observers, which the session calls during training and which can stop it, and trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pybackend.core.errors import InputError
from pybackend.core.job import messages
from pybackend.core.job.arguments import LOGS, choose_log_folder, find_mismatch, name_arguments
from pybackend.core.words import call_of, show, term

OnEnd = Callable[[int, dict[str, Any]], object]
_Kind = TypeVar("_Kind")


@name_arguments
@dataclass(frozen=True)
class Observer:
    """Functions that this session calls while the workers train.

    Pass it in ``callbacks`` of `barrier_train`, together with Keras's own callbacks, which run on
    the workers. A function that returns True stops the training on all workers after the same step:
    at the end of the epoch, or within it at the next exchange of gradients. Any other return value
    is ignored. An exception in a function ends the training with that error.

    Among processes that `join`, only the first one's observers are called. With
    ``exchange=ParameterServer()``, only epoch ends are observed.

    Parameters
    ----------
    on_epoch_end
        Called as ``on_epoch_end(epoch, logs)`` with the number of the epoch, from 1, and a dict of
        the metrics over all rows, including the validation metrics. The workers wait until it
        returns.
    on_step_end
        Called as ``on_step_end(step, logs)`` a few times a second, not after every step. ``step``
        is the number of the step in its epoch, from 1. ``logs`` has the metrics over the rows that
        the first worker has used so far in the epoch. The workers do not wait for it.

    Raises
    ------
    InputError
        Neither function is given, or one cannot be called with these arguments.

    Examples
    --------
    >>> stop = Observer(on_epoch_end=lambda epoch, logs: logs["loss"] < 0.1)
    """

    on_epoch_end: OnEnd | None = None
    on_step_end: OnEnd | None = None

    def __post_init__(self) -> None:
        given, taken = vars(self), f"a number and a {term('dict')} of metrics"
        for name, fn in given.items():
            if fn is not None and not callable(fn):
                raise InputError(f"`{name}` must be a function of {taken}, not {show(fn)}")
            if fn is not None and (mismatch := find_mismatch(fn, 1, {})) is not None:
                raise InputError(f"`{name}` is called with {taken}, but {mismatch}")
        if not any(given.values()):
            raise InputError(f"an {term('Observer')} needs one of {', '.join(given)}")


class Observers:
    """The observers of a call. ``see_steps``: any of them, or a tracker, receives steps."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)
        self._wants_stop = False
        self.see_steps = any(one.on_step_end for one in observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def __call__(self, event: messages.Event) -> messages.Answer | None:
        """Call the functions for an event, and return the answer to send to the workers."""
        # All ranks end the same epochs: an observer sees each once.
        if not self._observers or event.rank != 0:
            return None
        if isinstance(event, messages.EpochEnded):
            self._tell([o.on_epoch_end for o in self._observers], event.epoch, event.logs)
            return messages.StopTraining() if self._wants_stop else messages.GoOn(event.epoch)
        if isinstance(event, messages.StepEnded):
            self._tell([o.on_step_end for o in self._observers], event.step, event.logs)
            return messages.StopTraining() if self._wants_stop else None
        return None

    def _tell(self, functions: Sequence[OnEnd | None], number: int, logs: Any) -> None:
        for fn in functions:
            # Each function gets its own copy, because it may change it.
            answer = fn(number, dict(logs)) if fn else None
            # A comparison of NumPy values returns its own class.
            if type(answer).__name__ in ("bool", "bool_") and answer:
                self._wants_stop = True


class Tracked(ABC):
    """The record of one training run in a tracking system.

    The caller reports errors, but training continues without the record.
    """

    @abstractmethod
    def log(self, axis: Literal["epoch", "step"], number: int, values: Mapping[str, float]) -> None:
        """Record metrics at an epoch or a step, both counted from 1 over the whole training."""

    @abstractmethod
    def finish(self, result: Any) -> None:
        """Record a `TrainResult`, and end the run."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Record an error, and end the run."""


class Tracker(ABC):
    """Settings for recording training runs: the result of `track_mlflow` or `track_wandb`."""

    system: str
    """Name of the tracking system in messages."""
    steps: bool
    """Whether metrics are recorded within epochs, too."""

    @abstractmethod
    def begin(self, prepared: Any) -> Tracked:
        """Start the record of a `PreparedTraining`; an error ends the call."""

    @abstractmethod
    def for_trial(self, number: int, arguments: Mapping[str, Any]) -> Tracker:
        """Return the settings for one of several trials, which run at once on other threads."""


@dataclass(frozen=True)
class EventFolder:
    """Folder or URI for TensorBoard's event files: the result of `track_tensorboard`.

    None: a new folder for each training run.
    """

    folder: str | None

    def choose(self) -> EventFolder:
        return EventFolder(self.folder or choose_log_folder())

    def for_trial(self, number: int, arguments: Mapping[str, Any]) -> EventFolder:
        return EventFolder(f"{(self.folder or LOGS).rstrip('/')}/trial-{number}")


def split_folder(callbacks: Any) -> tuple[str | None, list[Any]]:
    """Separate the folder for TensorBoard from other callbacks; two raise an `InputError`."""
    folders, others = _split(callbacks, EventFolder)
    if len(folders) > 1:
        raise InputError("`callbacks` contains two folders for TensorBoard: pass one")
    return folders[0].choose().folder if folders else None, others


_MAKERS = ("track_mlflow", "track_wandb", "track_tensorboard")


def split_trackers(callbacks: Any) -> tuple[tuple[Tracker, ...], list[Any]]:
    """Separate trackers from observers and Keras callbacks."""
    for callback in list_callbacks(callbacks):
        name = getattr(callback, "__name__", "")
        if callable(callback) and name in _MAKERS:
            raise InputError(f"`callbacks` contains the function {name}: call it, {call_of(name)}")
    trackers, others = _split(callbacks, Tracker)  # type: ignore[type-abstract]
    return tuple(trackers), others


def list_callbacks(callbacks: Any) -> list[Any]:
    """Return the argument ``callbacks`` as a list, empty for None."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def split_observers(callbacks: Any) -> tuple[list[Observer], list[Any]]:
    """Separate observers from Keras callbacks."""
    if any(callback is Observer for callback in list_callbacks(callbacks)):
        raise InputError(
            f"`callbacks` contains the class {term('Observer')}: pass an instance, "
            f"{call_of('Observer', ...)}"
        )
    return _split(callbacks, Observer)


def _split(callbacks: Any, kind: type[_Kind]) -> tuple[list[_Kind], list[Any]]:
    listed = list_callbacks(callbacks)
    chosen = [one for one in listed if isinstance(one, kind)]
    return chosen, [one for one in listed if not isinstance(one, kind)]


class Recording:
    """The records of one training run. Errors of a tracking system become notes.

    ``say`` receives the notes, at most one for each record.
    """

    def __init__(self, say: messages.Emit) -> None:
        self._say = say
        self._records: list[tuple[str, Tracked]] = []
        self._noted: set[str] = set()
        self._seen: dict[int, set[str]] = {}

    def begin(self, prepared: Any) -> None:
        for tracker in prepared.trackers:
            self._records.append((tracker.system, tracker.begin(prepared)))

    def __call__(self, event: messages.Event) -> None:
        if not self._records or event.rank != 0:
            return
        if isinstance(event, messages.EpochEnded):
            values = {**list_numbers(event.logs), "epoch_seconds": event.seconds}
            self._seen[event.epoch] = set(values)
            self._record("log", "epoch", event.epoch, values)
        elif isinstance(event, messages.StepEnded):
            values = {f"step/{name}": value for name, value in list_numbers(event.logs).items()}
            if event.seconds > 0:
                values["step/rows_per_second"] = event.rows / event.seconds
            self._record("log", "step", (event.epoch - 1) * event.steps + event.step, values)

    def finish(self, result: Any) -> None:
        """Record the result, with metrics that did not reach this session as events."""
        late: dict[int, dict[str, float]] = {}
        for name, values in result.history.items():
            for epoch, value in zip(result.epochs_of(name), values, strict=False):
                late.setdefault(epoch, {}).update(list_numbers({name: value}))
        for epoch, logs in late.items():
            seen = self._seen.get(epoch, ())
            # Those of other callbacks, or all if the workers cannot reach this session.
            if unseen := {k: v for k, v in logs.items() if k not in seen}:
                self._record("log", "epoch", epoch, unseen)
        self._record("finish", result)

    def fail(self, error: BaseException) -> None:
        self._record("fail", error)

    def _record(self, method: str, *arguments: Any) -> None:
        for system, record in self._records:
            try:
                getattr(record, method)(*arguments)
            except Exception as error:  # hours of training must not end with the tracking server
                text = f"{system} does not have the whole run: {type(error).__name__}: {error}"
                if system not in self._noted:
                    self._say(messages.Note(text))
                self._noted.add(system)


@contextmanager
def recording(prepared: Any, say: messages.Emit) -> Iterator[Recording]:
    """Record a training run with its trackers. Among processes that join, only the first does."""
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
            found |= list_numbers({f"{name}.{index}": one for index, one in enumerate(value)})
    return found
