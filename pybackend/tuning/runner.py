"""Run trials at once: each on its own thread, and everything of the user's on the calling one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.observer import Observer, Observers
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.train_result import TrainResult
from pybackend.core.api.training_run import run_prepared
from pybackend.core.errors import InputError, TfdistError, printable
from pybackend.core.job.messages import EpochEnded, Event, StepEnded, StopTraining
from pybackend.core.launchers import Launcher, StopRequestedError, check_stop, stopped_by
from pybackend.core.words import show, spoken
from pybackend.tuning.grid import Arguments, TrialSource
from pybackend.tuning.trials import ModelFiles, Status, StoredResult, Trial

# A short wait, so that Ctrl-C is noticed by Python's main thread, and by R.
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class TrialCall:
    """The call and the prepared training run of one trial, without its observers."""

    call: TrainingCall
    prepared: PreparedTraining


@dataclass
class _Running:
    number: int
    arguments: Arguments
    planned: TrialCall
    launcher: Launcher
    began: float
    thread: threading.Thread | None = None
    is_pruned: bool = False
    looked: float = field(default_factory=time.monotonic)

    @property
    def observers(self) -> Observers:
        return self.planned.prepared.observers

    @property
    def epochs(self) -> int:
        return self.planned.prepared.job.epochs

    def lap(self) -> float:
        """Return the seconds since the event before."""
        before, self.looked = self.looked, time.monotonic()
        return self.looked - before


@dataclass(frozen=True)
class _Asked:
    """Event of a trial that waits for the answer: whether to stop it."""

    number: int
    event: Event
    answer: Future[bool]


@dataclass(frozen=True)
class _Ended:
    number: int
    outcome: TrainResult | Exception


@dataclass
class TrialRunner:
    """Runs trials on launchers, one at a time on each.

    Each trial is on a thread of its own. All calls of the user's code are on the thread of `run`.
    """

    source: TrialSource
    prepare: Callable[[int, Arguments], TrialCall]  # given the number of the trial
    failed: Sequence[Trial]  # before the first one that could be prepared
    first: tuple[Arguments, TrialCall]  # that one
    launchers: Sequence[Launcher]  # that may be used at once
    metric: str
    on_trial: Callable[[Trial], object]
    on_epoch: Callable[[int, EpochEnded], object] | None = None  # given the number of the trial

    def __post_init__(self) -> None:
        self._messages: queue.SimpleQueue[_Asked | _Ended] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._free = list(reversed(self.launchers))
        self._running: dict[int, _Running] = {}
        self._started = len(self.failed) + 1
        self._trials: list[Trial] = []
        self._models = ModelFiles()

    def run(self) -> list[Trial]:
        """Run all trials, and return them in the order in which they were started.

        If an observer raises an error, or on Ctrl-C, all trials are stopped.
        """
        try:
            for trial in self.failed:
                self._note(trial)
            self._start(self._started, *self.first)
            self._start_more()
            while self._running:
                with suppress(queue.Empty):
                    self._handle(self._messages.get(timeout=_LOOK_SECONDS))
        finally:
            self._stop.set()
            for one in list(self._running.values()):
                _join(one.thread)
        return sorted(self._trials, key=lambda trial: trial.number)

    def _start_more(self) -> None:
        while self._free:
            arguments = self.source.ask(self._started + 1)
            if arguments is None:
                return
            self._started += 1
            began = time.monotonic()
            try:
                planned = self.prepare(self._started, arguments)
            except Exception as error:
                seed = self.first[1].prepared.job.seed
                self._note(make_trial(self._started, arguments, seed, began, error))
            else:
                self._start(self._started, arguments, planned)

    def _start(self, number: int, arguments: Arguments, planned: TrialCall) -> None:
        running = _Running(number, arguments, planned, self._free.pop(), time.monotonic())
        self._running[number] = running
        prepared = replace(
            planned.prepared,
            observers=self._relay(running),
            launcher=running.launcher,
            began=running.began,
        )

        def work() -> None:
            with suppress(StopRequestedError), stopped_by(self._stop):
                outcome: TrainResult | Exception
                try:
                    outcome = run_prepared(prepared)
                except Exception as error:
                    outcome = error
                self._messages.put(_Ended(number, outcome))

        # With the context of this thread, which has the settings of launchers.
        context = copy_context()
        running.thread = threading.Thread(target=context.run, args=(work,), daemon=True)
        running.thread.start()

    def _relay(self, running: _Running) -> Observers:
        """Return observers that pass events to the calling thread, and wait for its answer."""
        sees_epochs = self.source.sees_epochs or self.on_epoch is not None or running.observers
        # The first trial shows whether there is such a metric.
        if not sees_epochs and running.number > len(self.failed) + 1:
            return Observers()

        def ask(event: Event) -> bool:
            asked = _Asked(running.number, event, Future())
            self._messages.put(asked)
            while True:
                # The calling thread may have raised an error, and answers no more.
                check_stop()
                with suppress(TimeoutError):
                    return asked.answer.result(_LOOK_SECONDS)

        def on_epoch_end(epoch: int, logs: dict[str, Any]) -> bool:
            return ask(EpochEnded(epoch, running.epochs, running.lap(), logs))

        def on_step_end(step: int, logs: dict[str, Any]) -> bool:
            return ask(StepEnded(0, 0, step, 0, 0, running.lap(), logs))

        return Observers(
            [Observer(on_epoch_end, on_step_end if running.observers.see_steps else None)]
        )

    def _handle(self, message: _Asked | _Ended) -> None:
        running = self._running[message.number]
        if isinstance(message, _Asked):
            message.answer.set_result(self._wants_stop(running, message.event))
            return
        _join(running.thread)
        del self._running[message.number]
        self._free.append(running.launcher)
        seed, found = running.planned.prepared.job.seed, message.outcome
        outcome = found if isinstance(found, Exception) else self._models.store(found)
        number, arguments, began = running.number, running.arguments, running.began
        self._note(make_trial(number, arguments, seed, began, outcome, running.is_pruned))
        self._start_more()

    def _note(self, trial: Trial) -> None:
        self._trials.append(trial)
        self.source.tell(trial, trial.metrics.get(self.metric))
        self.on_trial(trial)

    def _wants_stop(self, running: _Running, event: Event) -> bool:
        stops = isinstance(running.observers(event), StopTraining)
        if not isinstance(event, EpochEnded):
            return stops
        if self.on_epoch is not None:
            self.on_epoch(running.number, event)
        value = event.logs.get(self.metric)
        if value is None:
            if running.planned.call.options["validation_freq"] == 1:
                raise InputError(
                    f"`metric` is {show(self.metric)}, but the trials have only "
                    f"{', '.join(event.logs)}: pass one of these, or `validation_data` for values "
                    "of validation rows"
                )
            return stops
        if not self.source.sees_epochs:
            return stops
        # The source sees each value, also of a trial that ends with this epoch anyway.
        is_poor = self.source.prunes(running.number, event.epoch, value)
        if is_poor and not stops and event.epoch < event.epochs:
            running.is_pruned = True
        return stops or running.is_pruned


def _join(thread: threading.Thread | None) -> None:
    while thread is not None and thread.is_alive():
        thread.join(_LOOK_SECONDS)


def make_trial(
    number: int,
    arguments: Arguments,
    seed: int,
    began: float,
    outcome: StoredResult | Exception,
    is_pruned: bool = False,
) -> Trial:
    seconds = time.monotonic() - began
    if isinstance(outcome, Exception):
        return Trial(number, arguments, "failed", {}, 0, seconds, seed, _explain(outcome))
    result = outcome.result
    metrics = {name: values[-1] for name, values in result.history.items() if values}
    status: Status = "pruned" if is_pruned else "completed"
    return Trial(number, arguments, status, metrics, result.epochs, seconds, seed, stored=outcome)


def _explain(error: Exception) -> str:
    """Return the first line of an error, which has the rank, the host and the reason."""
    first = printable(str(error)).partition("\n")[0]
    is_r = spoken() == "R" and type(error) is RuntimeError  # of an R function, by reticulate
    return first if is_r or isinstance(error, TfdistError) else f"{type(error).__name__}: {first}"
