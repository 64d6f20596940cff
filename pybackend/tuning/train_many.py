"""Train a model many times at once, with different arguments."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, Unpack, cast

from pybackend.core.api.calls import Target, TrainingCall, explain_arguments, take_options
from pybackend.core.api.observer import EventFolder, list_callbacks
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import MAX_WORKERS, check_whole_number
from pybackend.core.job.call_options import TrainingOptions, TrialOptions
from pybackend.core.job.job import TrainingJob, make_job
from pybackend.core.job.storage_options import check_model_options, check_recovery
from pybackend.core.launchers import Dividing, launcher_for
from pybackend.core.words import show
from pybackend.tuning.grid import ModelFunction, choose_source
from pybackend.tuning.pruning import Pruning
from pybackend.tuning.runner import Search
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
    # All trials would write these files.
    if check_recovery(call.options["recovery"]).checkpoint is not None:
        raise InputError("`recovery` of trials has no `uri`: they are not saved")
    if check_model_options(call.options["model_options"]).uri is not None:
        raise InputError("`model_options` of trials has no `uri`: their results have the models")
    has_validation = given.get("validation_data") is not None or given.get("validation_split")
    compared = metric or ("val_loss" if has_validation else "loss")
    function = ModelFunction.of(model)
    source = choose_source(grid, study, trials, prune, compared, mode)
    verbose = check_whole_number("verbose", verbose, least=0, most=2)
    workers = check_whole_number("workers_per_trial", workers_per_trial, least=1, most=MAX_WORKERS)
    # All trials write their event files into one folder, in which each has its own.
    callbacks = [
        one.choose() if isinstance(one, EventFolder) else one
        for one in list_callbacks(call.options["callbacks"])
    ]
    call = call.with_options(workers=workers, callbacks=callbacks)
    if parallelism is not None:
        parallelism = check_whole_number("parallelism", parallelism, least=1)
    if on_trial is not None and not callable(on_trial):
        raise InputError(f"`on_trial` must be a function of a trial, not {show(on_trial)}")
    if not isinstance(launcher, Dividing):
        raise InputError(
            f"trials cannot run at once here ({launcher.where}): train on this machine "
            f"({show('local')}), Spark, hosts(...), slurm() or kubernetes(...)"
        )
    known = source.list_known()
    for arguments in known:
        function.check(arguments)
        options_of_call = function.split(arguments)[1]
        if None not in options_of_call.values():  # else only names are known
            make_job(TrainingJob, {**call.arguments, **options_of_call})
    return Search(call, function, source, compared, on_trial, verbose).run(launcher, parallelism)
