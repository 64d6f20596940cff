"""Train a model many times at once, with different arguments."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Unpack, cast

from pybackend.core.api.call_data import check_rows, count_known, read_training_data
from pybackend.core.api.calls import Target, TrainingCall, explain_arguments, take_options
from pybackend.core.api.display import choose_lines, epoch_line, say
from pybackend.core.api.observer import EventFolder, Tracker, list_callbacks
from pybackend.core.api.prepared_training import prepare_training
from pybackend.core.data.batches import is_dataset
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import MAX_WORKERS, check_whole_number, counted
from pybackend.core.job.call_options import TrainingOptions, TrialOptions
from pybackend.core.job.job import TrainingJob, make_job
from pybackend.core.job.messages import EpochEnded
from pybackend.core.job.storage_options import check_model_options, check_recovery
from pybackend.core.launchers import Checking, Dividing, Launcher, launcher_for
from pybackend.core.words import show
from pybackend.tuning.grid import (
    Arguments,
    ModelFunction,
    TrialSource,
    choose_direction,
    choose_source,
)
from pybackend.tuning.pruning import Pruning
from pybackend.tuning.runner import TrialCall, TrialRunner, make_trial
from pybackend.tuning.trials import Trial, Trials


class Table(Protocol):
    """A data frame of pandas or polars, for annotations without them."""

    @property
    def columns(self) -> Any: ...


@explain_arguments
@take_options
def train_many(
    spark: Target,
    model: Callable[..., Any],
    data: Any,
    *,
    grid: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Table,
    workers_per_trial: int = 1,
    parallelism: int | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    prune: Pruning | None = None,
    study: Any = None,
    trials: int | None = None,
    on_trial: Callable[[Trial], object] | None = None,
    **options: Unpack[TrialOptions],
) -> Trials:
    """Train a model many times at once with different arguments, and compare the results.

    Each trial is a training run as by `barrier_train`, with equal results. On this machine, the
    rows are encoded and written once for all trials, and later trials start within milliseconds.

    Parameters
    ----------
    spark
        Where the workers run, as in `barrier_train`, but not processes that `join`.
    model
        A function that returns a compiled Keras model. It is called on every worker with the values
        of a trial as named arguments.
    data
        As in `barrier_train`.
    grid
        What to try: a dict of lists, for all combinations of their values; a list of dicts, or a
        data frame, for one trial per row. The names are arguments of ``model``, or ``batch_size``,
        ``epochs``, ``exchange``, ``seed`` or ``steps_per_epoch``. With ``study``: a dict of
        Optuna's distributions.
    workers_per_trial
        Number of workers of each trial.
    parallelism
        Number of trials that run at once. None (default): as many as there are free cores and GPUs
        on this machine, or slots on the cluster.
    metric
        Metric by which trials are compared, after the last epoch. None (default): ``"val_loss"``,
        or ``"loss"`` if there is no validation data.
    mode
        ``"min"`` or ``"max"``: which values of the metric are better. None (default): ``"max"`` if
        its name ends with accuracy, acc, auc, precision, recall, f1_score, r2_score or iou, else
        ``"min"``; or the direction of ``study``.
    prune
        `MedianPruning` or `SuccessiveHalving`: stops trials whose metric is worse than that of
        others after the same epoch. Which ones depends on the order in which trials end their
        epochs. None (default): all trials run all epochs.
    study
        An Optuna study, which suggests the values of each trial, and whose pruner stops poor ones.
    trials
        Number of trials; only with ``study``.
    on_trial
        Called in this session with each `Trial` when it ends.
    callbacks
        As in `barrier_train`; every trial has its own copies. An `Observer` sees all trials.
    seed
        Seed of every trial. None (default): a random one.
    resources
        `Resources` of each worker. None (default): all trials that run at once on this machine
        divide its cores and GPUs.
    recovery
        As in `barrier_train`, for each trial, but without a folder.
    model_options
        As in `barrier_train`, but without a URI.
    verbose
        0: silent. 1 (default): a line for each trial. 2: also a line for each epoch of a trial.

    Returns
    -------
    Trials
        All trials, in order: ``best()`` returns the best one, with its model, and ``to_frame()`` a
        data frame with a row for each. A trial that fails is a row with its error, and the others
        continue. Models are on this machine's disk, in a temporary file without a name.

    Raises
    ------
    InputError
        An argument is invalid. Nothing was started.
    ClusterError
        The cluster has too few slots.

    Examples
    --------
    >>> def build(units, rate):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
    ...     model.compile(keras.optimizers.Adam(rate), "mse")
    ...     return model
    >>> grid = {"units": [16, 64], "rate": [0.1, 0.01]}
    >>> trials = train_many("local", build, (x, y), grid=grid)  # doctest: +SKIP
    >>> trials.best().model  # doctest: +SKIP
    """
    launcher = launcher_for(spark)
    verbose, seed = options.get("verbose", 1), options.get("seed")
    given = cast("TrainingOptions", {**options, "workers": workers_per_trial, "verbose": 0})
    given["seed"] = secrets.randbelow(2**31) if seed is None else seed
    call = TrainingCall(spark=launcher, model=None, data=data, options=given)
    _check_not_saved(call)
    compared = metric or choose_metric(call)
    search = Search(
        call=call,
        model=ModelFunction.of(model),
        source=choose_source(grid, study, trials, prune, choose_direction(compared, mode, study)),
        launcher=launcher,
        parallelism=parallelism,
        metric=compared,
        on_trial=on_trial,
        verbose=verbose,
    )
    return search.run()


def _check_not_saved(call: TrainingCall) -> None:
    """Reject files that all trials would write."""
    if check_recovery(call.options["recovery"]).checkpoint is not None:
        raise InputError("`recovery` of trials has no `uri`: they are not saved")
    if check_model_options(call.options["model_options"]).uri is not None:
        raise InputError("`model_options` of trials has no `uri`: their results have the models")


def choose_metric(call: TrainingCall) -> str:
    options = call.options
    has_validation = options["validation_data"] is not None or options["validation_split"]
    return "val_loss" if has_validation else "loss"


@dataclass
class Search:
    """Trials of a call; the fields are as in `train_many` and `TrialRunner`."""

    call: TrainingCall  # with what all trials share, without the model
    model: ModelFunction
    source: TrialSource
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
        # All trials write their event files into one folder, in which each has its own.
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
        known = self.source.list_known()
        for arguments in known:
            self.model.check(arguments)
        for arguments in known:
            options = self.model.split(arguments)[1]
            if None not in options.values():  # else only names are known
                make_job(TrainingJob, {**self.call.arguments, **options})

    def run(self) -> Trials:
        assert isinstance(self.launcher, Dividing)
        failed, arguments, first = self._prepare_first()
        job = first.prepared.job
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
                if not failed:  # an error that all trials share, such as of the data, is raised
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
