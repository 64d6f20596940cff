"""Run trials at once: each on its own thread, and everything of the user's on the calling one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pybackend.core import launchers
from pybackend.core.api.call_data import check_rows, count_known, read_training_data
from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.display import choose_lines, epoch_line, say
from pybackend.core.api.observer import EventFolder, Observer, Observers, Tracker, list_callbacks
from pybackend.core.api.prepared_training import PreparedTraining, prepare_training
from pybackend.core.api.train_result import TrainResult
from pybackend.core.api.training_run import run_prepared
from pybackend.core.data.batches import is_dataset
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.errors import InputError, TfdistError, printable
from pybackend.core.job.arguments import counted
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import EpochEnded, Event, StepEnded, StopTraining
from pybackend.core.words import show, spoken
from pybackend.tuning.grid import Arguments, ModelFunction, TrialSource
from pybackend.tuning.trials import ModelFiles, Status, Trial, Trials

# A short wait, so that Ctrl-C is noticed by Python's main thread, and by R.
_LOOK_SECONDS = 0.1


@dataclass
class _Running:
    """A trial that was prepared. The prepared training run has its observers."""

    number: int
    arguments: Arguments
    call: TrainingCall
    prepared: PreparedTraining
    launcher: launchers.Launcher = field(init=False)
    thread: threading.Thread | None = None
    is_pruned: bool = False
    began: float = 0.0
    looked: float = 0.0

    @property
    def observers(self) -> Observers:
        return self.prepared.observers

    def lap(self) -> float:
        """Return the seconds since the event before."""
        before, self.looked = self.looked, time.monotonic()
        return self.looked - before


@dataclass
class Search:
    """Trials of a call, one at a time on each of several launchers.

    Each trial is on a thread of its own. All calls of the user's code are on the thread of `run`.
    """

    call: TrainingCall  # with what all trials share, without the model
    model: ModelFunction
    source: TrialSource
    metric: str
    on_trial: Callable[[Trial], object] | None
    verbose: int

    def __post_init__(self) -> None:
        # What the trials' threads want to be called on the thread of `run`.
        self._messages: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._free: list[launchers.Launcher] = []
        self._running: dict[int, _Running] = {}
        self._asked = self._first = 0
        self._trials: list[Trial] = []
        self._models = ModelFiles()
        self._known: Mapping[str, Any] | None = None

    def run(self, launcher: launchers.Launcher, parallelism: int | None) -> Trials:
        """Run all trials, and return them in the order in which they were started.

        If an observer raises an error, or on Ctrl-C, all trials are stopped.
        """
        began = time.monotonic()
        failed = []
        while isinstance(first := self._prepare_next(), Trial):
            failed.append(first)
        if first is None:
            raise InputError(f"no trial can start; {failed[0].label} failed: {failed[0].error}")
        self._first, job = first.number, first.prepared.job
        if isinstance(launcher, launchers.Checking):
            launcher.check(job)
        assert isinstance(launcher, launchers.Dividing)
        with launcher.divide(job, self.source.count, parallelism) as parts:
            self._show(
                f"Training {counted(self.source.count, 'trial')}, {len(parts)} at once, each "
                f"with {counted(job.workers, 'worker')}: {launcher.where} ..."
            )
            self._free = list(reversed(parts))
            try:
                for trial in failed:
                    self._note(trial)
                self._start(first)
                self._start_more()
                while self._running:
                    with suppress(queue.Empty):
                        self._messages.get(timeout=_LOOK_SECONDS)()
            finally:
                self._stop.set()
                for one in list(self._running.values()):
                    _join(one.thread)
        trials = sorted(self._trials, key=lambda trial: trial.number)
        seconds = time.monotonic() - began
        return Trials(trials, self.metric, self.source.mode, len(parts), seconds)

    def _prepare_next(self) -> _Running | Trial | None:
        """Prepare the next trial; return it as failed if it cannot start. None: there is none."""
        arguments = self.source.ask(self._asked + 1)
        if arguments is None:
            return None
        self._asked += 1
        began, number = time.monotonic(), self._asked
        try:
            return self._prepare(number, arguments)
        except Exception as error:
            if number == 1:  # an error that all trials share, such as of the data, is raised
                prepare_training(replace(self.call, model=_build_nothing), self._read)
            seed, seconds = self.call.options["seed"] or 0, time.monotonic() - began
            return _fail(number, arguments, seconds, seed, error)

    def _prepare(self, number: int, arguments: Arguments) -> _Running:
        own, options = self.model.split(arguments)
        call = self.call.with_options(**options)
        callbacks = [
            one.for_trial(number, own) if isinstance(one, Tracker | EventFolder) else one
            for one in list_callbacks(call.options["callbacks"])
        ]
        call = replace(call, model=self.model.build(own, call.options["seed"] or 0))
        call = call.with_options(callbacks=callbacks)
        return _Running(number, arguments, call, prepare_training(call, self._read))

    def _read(
        self, launcher: Any, call: TrainingCall, columns: ColumnSpec, job: TrainingJob
    ) -> Mapping[str, Any]:
        """Return the data sets, which the first trial reads for all."""
        if is_dataset(call.data) or is_dataset(call.options["validation_data"]):
            return read_training_data(launcher, call, columns, job)
        if self._known is None:
            self._known = read_training_data(launcher, call, columns, job)
        elif (rows := count_known(self._known["train"])) is not None:
            check_rows(rows, "data", job)
        return self._known

    def _start_more(self) -> None:
        while self._free and (found := self._prepare_next()) is not None:
            if isinstance(found, Trial):
                self._note(found)
            else:
                self._start(found)

    def _start(self, running: _Running) -> None:
        self._running[running.number] = running
        running.launcher = self._free.pop()
        running.began = running.looked = time.monotonic()
        prepared = replace(
            running.prepared,
            observers=self._relay(running),
            launcher=running.launcher,
            began=running.began,
        )

        def work() -> None:
            with suppress(launchers.StopRequestedError), launchers.stopped_by(self._stop):
                outcome: TrainResult | Exception
                try:
                    outcome = run_prepared(prepared)
                except Exception as error:
                    outcome = error
                self._messages.put(partial(self._end, running, outcome))

        # With the context of this thread, which has the settings of launchers.
        context = copy_context()
        running.thread = threading.Thread(target=context.run, args=(work,), daemon=True)
        running.thread.start()

    def _relay(self, running: _Running) -> Observers:
        """Return observers that pass events to the calling thread, and wait for its answer."""
        sees_epochs = self.source.sees_epochs or self.verbose > 1 or running.observers
        # The first trial shows whether there is such a metric.
        if not sees_epochs and running.number > self._first:
            return Observers()

        def ask(event: Event) -> bool:
            answer: Future[bool] = Future()
            self._messages.put(lambda: answer.set_result(self._wants_stop(running, event)))
            while True:
                # The calling thread may have raised an error, and answers no more.
                launchers.check_stop()
                with suppress(TimeoutError):
                    return answer.result(_LOOK_SECONDS)

        def on_epoch_end(epoch: int, logs: dict[str, Any]) -> bool:
            epochs = running.prepared.job.epochs
            return ask(EpochEnded(epoch, epochs, running.lap(), logs))

        def on_step_end(step: int, logs: dict[str, Any]) -> bool:
            return ask(StepEnded(0, 0, step, 0, 0, running.lap(), logs))

        see_steps = running.observers.see_steps
        return Observers([Observer(on_epoch_end, on_step_end if see_steps else None)])

    def _end(self, running: _Running, outcome: TrainResult | Exception) -> None:
        _join(running.thread)
        del self._running[running.number]
        self._free.append(running.launcher)
        seconds, seed = time.monotonic() - running.began, running.prepared.job.seed
        known = running.number, running.arguments
        if isinstance(outcome, Exception):
            self._note(_fail(*known, seconds, seed, outcome))
        else:
            status: Status = "pruned" if running.is_pruned else "completed"
            metrics = {name: values[-1] for name, values in outcome.history.items() if values}
            stored = self._models.store(outcome)
            trial = Trial(*known, status, metrics, outcome.epochs, seconds, seed, stored=stored)
            self._note(trial)
        self._start_more()

    def _note(self, trial: Trial) -> None:
        self._trials.append(trial)
        self.source.tell(trial, trial.metrics.get(self.metric))
        self._show(trial.describe())
        if self.on_trial is not None:
            self.on_trial(trial)

    def _show(self, text: str) -> None:
        choose_lines(self.verbose).trials(text, len(self._trials), self.source.count)

    def _wants_stop(self, running: _Running, event: Event) -> bool:
        stops = isinstance(running.observers(event), StopTraining)
        if not isinstance(event, EpochEnded):
            return stops
        if self.verbose > 1:
            say(f"trial {running.number}: {epoch_line(event)}", self.verbose)
        value = event.logs.get(self.metric)
        if value is None:
            if running.call.options["validation_freq"] == 1:
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


def _fail(number: int, arguments: Arguments, seconds: float, seed: int, error: Exception) -> Trial:
    return Trial(number, arguments, "failed", {}, 0, seconds, seed, _explain(error))


def _explain(error: Exception) -> str:
    """Return the first line of an error, which has the rank, the host and the reason."""
    first = printable(str(error)).partition("\n")[0]
    is_r = spoken() == "R" and type(error) is RuntimeError  # of an R function, by reticulate
    return first if is_r or isinstance(error, TfdistError) else f"{type(error).__name__}: {first}"


def _build_nothing() -> None:
    """Stand for the function that builds a trial's model, which only workers call."""
