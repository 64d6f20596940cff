"""A checked call of `train_many`: prepare its trials, and run them on parts of the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.data_checks import check_rows
from pybackend.core.api.datasets import read_training_data
from pybackend.core.api.display import choose_lines
from pybackend.core.api.observer import EventFolder, Tracker, list_callbacks
from pybackend.core.api.planned_rows import count_known
from pybackend.core.api.prepared_training import prepare_training
from pybackend.core.api.progress import epoch_line, say
from pybackend.core.data.batches import is_dataset
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import MAX_WORKERS, check_whole_number, counted
from pybackend.core.job.job import TrainingJob, make_job
from pybackend.core.job.messages import EpochEnded
from pybackend.core.launchers import Checking, Dividing, Launcher
from pybackend.core.words import show
from pybackend.tuning.grid import Arguments, ModelFunction
from pybackend.tuning.result import Trial, Trials
from pybackend.tuning.runner import TrialCall, TrialRunner, make_trial
from pybackend.tuning.source import Source


def choose_metric(call: TrainingCall) -> str:
    """Return the metric by which trials are compared by default."""
    options = call.options
    has_validation = options["validation_data"] is not None or options["validation_split"]
    return "val_loss" if has_validation else "loss"


@dataclass
class Search:
    """Trials of one call, and how to run them.

    Parameters
    ----------
    call
        Arguments that all trials share, without the model.
    model
        The function that builds the model of each trial.
    source, metric, on_trial
        As in `TrialRunner`.
    launcher, parallelism, verbose
        As in `train_many`.

    Raises
    ------
    InputError
        An argument is invalid.
    """

    call: TrainingCall
    model: ModelFunction
    source: Source
    launcher: Launcher
    parallelism: int | None
    metric: str
    on_trial: Callable[[Trial], object] | None
    verbose: int

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._ended = 0
        self._known: Mapping[str, Any] | None = None
        self.verbose = check_whole_number("verbose", self.verbose, least=0, most=2)
        workers = check_whole_number(
            "workers_per_trial", self.call.options["workers"], least=1, most=MAX_WORKERS
        )
        # All trials write their event files into one folder.
        callbacks = [
            one.choose() if isinstance(one, EventFolder) else one
            for one in list_callbacks(self.call.options["callbacks"])
        ]
        self.call = self.call.with_options(workers=workers, callbacks=callbacks)
        if self.parallelism is not None:
            self.parallelism = check_whole_number("parallelism", self.parallelism, least=1)
        if self.on_trial is not None and not callable(self.on_trial):
            raise InputError(f"`on_trial` must be a function of a trial, not {show(self.on_trial)}")
        if not isinstance(self.launcher, Dividing):
            raise InputError(
                f"trials cannot run at once here ({self.launcher.where}): train on this machine "
                f"({show('local')}), Spark, hosts(...), slurm() or kubernetes(...)"
            )
        for arguments in self.source.list_known():
            self.model.check(arguments)
        for arguments in self.source.list_known():
            options = self.model.split(arguments)[1]
            if None not in options.values():  # else only names are known
                make_job(TrainingJob, {**self.call.arguments, **options})

    def run(self) -> Trials:
        """Run all trials, and return them."""
        assert isinstance(self.launcher, Dividing)
        failed, arguments, first = self._prepare_first()
        job = first.prepared.request.job
        if isinstance(self.launcher, Checking):
            self.launcher.check(job)
        with self.launcher.divide(job, self.source.count, self.parallelism) as launchers:
            self._show(
                f"Training {counted(self.source.count, 'trial')}, {len(launchers)} at once, each "
                f"with {counted(job.workers, 'worker')}: {self.launcher.where} ..."
            )
            runner = TrialRunner(
                source=self.source,
                prepare=self._prepare,
                failed=failed,
                first=(arguments, first),
                launchers=launchers,
                metric=self.metric,
                on_trial=self._note,
                on_epoch=self._note_epoch if self.verbose > 1 else None,
            )
            trials = runner.run()
        seconds = time.monotonic() - self._began
        return Trials(trials, self.metric, self.source.mode, len(launchers), seconds)

    def _prepare_first(self) -> tuple[list[Trial], Arguments, TrialCall]:
        """Prepare the first trial that can start; return it, and those before it, which failed."""
        failed: list[Trial] = []
        while (arguments := self.source.ask(len(failed) + 1)) is not None:
            began = time.monotonic()
            try:
                return failed, arguments, self._prepare(len(failed) + 1, arguments)
            except Exception as error:
                if not failed:  # an error that all trials share is raised here
                    prepare_training(replace(self.call, model=_build_nothing), self._read)
                seed = self.call.options["seed"] or 0
                failed.append(make_trial(len(failed) + 1, arguments, seed, began, error))
        raise InputError(f"no trial can start; {failed[0].label} failed: {failed[0].error}")

    def _prepare(self, number: int, arguments: Arguments) -> TrialCall:
        own, options = self.model.split(arguments)
        call = self.call.with_options(**options)
        callbacks = [
            one.for_trial(number, own) if isinstance(one, Tracker | EventFolder) else one
            for one in list_callbacks(call.options["callbacks"])
        ]
        call = replace(call, model=self.model.build(own, call.options["seed"] or 0))
        call = call.with_options(callbacks=callbacks)
        return TrialCall(call, prepare_training(call, self._read))

    def _read(
        self, launcher: Launcher, call: TrainingCall, columns: ColumnSpec, job: TrainingJob
    ) -> Mapping[str, Any]:
        """Return the data sets, which the first trial reads for all."""
        if is_dataset(call.data) or is_dataset(call.options["validation_data"]):
            return read_training_data(launcher, call, columns, job)
        if self._known is None:
            self._known = read_training_data(launcher, call, columns, job)
        elif (rows := count_known(self._known["train"])) is not None:
            check_rows(rows, "data", job)
        return self._known

    def _note(self, trial: Trial) -> None:
        self._ended += 1
        self._show(trial.describe())
        if self.on_trial is not None:
            self.on_trial(trial)

    def _show(self, text: str) -> None:
        choose_lines(self.verbose).trials(text, self._ended, self.source.count)

    def _note_epoch(self, number: int, event: EpochEnded) -> None:
        say(f"trial {number}: {epoch_line(event)}", self.verbose)


def _build_nothing() -> None:
    """Stand for the function that builds a trial's model, which only workers call."""
