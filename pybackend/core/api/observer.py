"""Observers, which the session calls during training and which can stop it, and trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import LOGS, choose_log_folder, find_mismatch, name_arguments
from pybackend.core.job.messages import Answer, EpochEnded, Event, GoOn, StepEnded, StopTraining
from pybackend.core.words import call_of, show, term

OnEnd = Callable[[int, dict[str, Any]], object]


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
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, fn in given.items():
            if fn is not None and not callable(fn):
                raise InputError(
                    f"`{name}` must be a function of a number and a {term('dict')} of metrics, not "
                    f"{show(fn)}"
                )
            if fn is not None and (mismatch := find_mismatch(fn, 1, {})) is not None:
                raise InputError(
                    f"`{name}` is called with a number and a {term('dict')} of metrics, but "
                    f"{mismatch}"
                )
        if not any(given.values()):
            raise InputError(f"an {term('Observer')} needs one of {', '.join(given)}")


class Observers:
    """All observers of one training run."""

    def __init__(
        self, observers: Sequence[Observer] = (), *, are_steps_tracked: bool = False
    ) -> None:
        self._observers = tuple(observers)
        self._are_steps_tracked = are_steps_tracked
        self._wants_stop = False

    def __bool__(self) -> bool:
        return bool(self._observers)

    @property
    def see_steps(self) -> bool:
        """True if any observer has a function for steps, or a tracker records them."""
        return self._are_steps_tracked or any(one.on_step_end for one in self._observers)

    def tracking_steps(self) -> Observers:
        """Return these observers, so that the session also receives steps for a tracker."""
        return Observers(self._observers, are_steps_tracked=True)

    def __call__(self, event: Event) -> Answer | None:
        """Call the functions for an event, and return the answer to send to the workers."""
        if not self._observers or event.rank != 0:
            return None
        if isinstance(event, EpochEnded):
            self._tell([o.on_epoch_end for o in self._observers], event.epoch, event.logs)
            return StopTraining() if self._wants_stop else GoOn(event.epoch)
        if isinstance(event, StepEnded):
            self._tell([o.on_step_end for o in self._observers], event.step, event.logs)
            return StopTraining() if self._wants_stop else None
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
        """Return it with a folder."""
        return EventFolder(self.folder or choose_log_folder())

    def for_trial(self, number: int, arguments: Mapping[str, Any]) -> EventFolder:
        """Return the folder of one of several trials."""
        return EventFolder(f"{(self.folder or LOGS).rstrip('/')}/trial-{number}")


def split_folder(callbacks: Any) -> tuple[str | None, list[Any]]:
    """Separate the folder for TensorBoard from other callbacks.

    Raises
    ------
    InputError
        There are two.
    """
    listed = list_callbacks(callbacks)
    folders = [one for one in listed if isinstance(one, EventFolder)]
    if len(folders) > 1:
        raise InputError("`callbacks` contains two folders for TensorBoard: pass one")
    others = [one for one in listed if not isinstance(one, EventFolder)]
    return folders[0].choose().folder if folders else None, others


_MAKERS = ("track_mlflow", "track_wandb", "track_tensorboard")


def split_trackers(callbacks: Any) -> tuple[tuple[Tracker, ...], list[Any]]:
    """Separate trackers from observers and Keras callbacks.

    Raises
    ------
    InputError
        A function such as `track_mlflow` was passed instead of its result.
    """
    listed = list_callbacks(callbacks)
    for callback in listed:
        name = getattr(callback, "__name__", "")
        if callable(callback) and name in _MAKERS:
            raise InputError(f"`callbacks` contains the function {name}: call it, {call_of(name)}")
    trackers = tuple(one for one in listed if isinstance(one, Tracker))
    return trackers, [one for one in listed if not isinstance(one, Tracker)]


def list_callbacks(callbacks: Any) -> list[Any]:
    """Return the argument ``callbacks`` as a list, empty for None."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def split_observers(callbacks: Any) -> tuple[list[Observer], list[Any]]:
    """Separate observers from Keras callbacks.

    Raises
    ------
    InputError
        The class was passed instead of an instance.
    """
    listed = list_callbacks(callbacks)
    if any(callback is Observer for callback in listed):
        raise InputError(
            f"`callbacks` contains the class {term('Observer')}: pass an instance, "
            f"{call_of('Observer', ...)}"
        )
    observers = [callback for callback in listed if isinstance(callback, Observer)]
    return observers, [c for c in listed if not isinstance(c, Observer)]
