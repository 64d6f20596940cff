"""Options of the calls: each is here once, with its type, default, check and meaning.

A class lists options that are taken together. `CALLS` lists the options of each call, whose
signature and help are made from them (`api/calls.py`). `describe_options` returns all as data.
"""

# No `from __future__ import annotations`: the types are read at run time.

import inspect
import math
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, TypedDict, is_typeddict

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import (
    MAX_WORKERS,
    Choice,
    Whole,
    as_number,
    check_fraction,
    check_seconds,
    check_whole_number,
)
from pybackend.core.job.storage_options import (
    DataOptions,
    ModelOptions,
    Recovery,
    check_data_options,
    check_model_options,
    check_recovery,
)
from pybackend.core.job.worker_options import (
    AnyExchange,
    Elastic,
    Exchange,
    LocalSteps,
    ParameterServer,
    Resources,
    ScaleLearningRate,
    check_exchange,
    check_resources,
)
from pybackend.core.words import show

# A path on the driver, or a URI.
PathOrUri = str | os.PathLike[str]
Features = Sequence[str] | Mapping[str, str | Sequence[str]]
OnMissing = Literal["null", "error"]
PredictionType = Literal["class", "prob", "raw"]
PredictionRuntime = Literal["keras", "onnx"]
Shuffle = Literal["shard", "global"] | bool
Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Option:
    """Default and check of an option.

    Attributes
    ----------
    default
        Value if a call does not pass the option.
    check
        Called with the name and a value: returns the value as jobs have it, or raises an
        `InputError`. None: the value is checked together with the rows or the model.
    """

    default: Any = None
    check: Check | None = None


def _validation_freq(name: str, value: Any) -> int | tuple[int, ...]:
    if isinstance(value, (list, tuple, set, frozenset, range)) and value:
        epochs = {check_whole_number(name, epoch, least=1) for epoch in value}
        return tuple(sorted(epochs))
    return check_whole_number(name, value, least=1)


def _class_weight(name: str, value: Any) -> tuple[tuple[int | str, float], ...] | None:
    """Return pairs of class and weight: JSON keys cannot be whole numbers."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        example = show({0: 1.0, 1: 5.0})
        raise InputError(f"`{name}` must map classes to weights, e.g. {example}, not {show(value)}")
    pairs = []
    for key, weight in value.items():
        number = as_number(weight)
        if number is None or not (math.isfinite(number) and number >= 0):
            raise InputError(f"`{name}` has the weight {show(weight)} for the class {show(key)}")
        pairs.append((key if isinstance(key, str) else class_number(key), number))
    return tuple(pairs)


def class_number(key: Any, levels: Sequence[str] = ()) -> int:
    """Return the code of a class in ``class_weight``; `InputError`: it is not that of a level."""
    is_text = isinstance(key, str) and key.isdecimal()  # R's names are text
    number = float(key) if is_text else as_number(key)
    is_code = number is not None and number.is_integer() and number >= 0
    if number is None or not is_code or (levels and number >= len(levels)):
        expected = f"the levels of the label, {', '.join(levels)}" if levels else "0, 1, 2, ..."
        raise InputError(f"`class_weight` has the class {show(key)}: use {expected}")
    return int(number)


def _seed(name: str, value: Any) -> int:
    """Check a seed; None: draw one."""
    drawn = secrets.randbelow(2**31)
    return drawn if value is None else check_whole_number(name, value, least=0, most=2**31 - 1)


def _verbose(name: str, value: Any) -> int:
    """Check ``verbose``: as in Keras, "auto" and True mean one line per epoch."""
    if value == "auto" or isinstance(value, bool):
        return int(bool(value))
    return check_whole_number(name, value, least=0, most=2)


def _object(check: Callable[[Any], Any]) -> Check:
    """Return the check of an object, which names the argument itself."""
    return lambda name, value: check(value)


class CountOptions(TypedDict, total=False):
    """Number of workers.

    Parameters
    ----------
    workers
        Number of workers. None (default): 2, or the number of processes that join.
    """

    workers: Annotated[int | None, Option(None, Whole(1, MAX_WORKERS))]


class ElasticOptions(TypedDict, total=False):
    """Number of workers, which may change during training.

    Parameters
    ----------
    workers
        Number of workers. None (default): 2, or the number of processes that join. `Elastic`:
        training continues without lost workers, and others may join. With a number, losing a worker
        ends training.
    """

    workers: Annotated[int | Elastic | None, Option(None, Whole(1, MAX_WORKERS))]


class BatchOptions(TypedDict, total=False):
    """Batches.

    Parameters
    ----------
    batch_size
        Maximum rows per worker and step. Global batches are those of Keras's ``fit`` with
        ``batch_size=workers * batch_size``: all have as many rows except the last, which has the
        rest. `replay_batches` lists them. If workers' shares differ in size, as the partitions of a
        Spark DataFrame do, rows are spread evenly over as many steps as the largest share needs.
    """

    batch_size: Annotated[int, Option(32, Whole(1))]


class FitOptions(TypedDict, total=False):
    """Arguments of Keras's ``fit``.

    Parameters
    ----------
    epochs
        Passes over the data. Each pass uses each row exactly once.
    steps_per_epoch
        Steps per epoch. The next epoch continues with the rows that follow, and after the last ones
        with the first, also within an epoch: Keras would end that epoch early. None (default): as
        many as it takes to use all rows.
    validation_data
        As ``data``. All workers evaluate it together after each epoch.
    validation_split
        Fraction of the rows to use for validation instead of ``validation_data``. They are the last
        rows of the arrays or the data frame (not a Spark one), before shuffling.
    validation_freq
        Number of epochs between validations, or a list of the epochs to validate after, counted
        from 1.
    callbacks
        Keras callbacks. Each worker runs its own copies, whose attributes stay on the worker.
        ``ModelCheckpoint``, ``CSVLogger``, ``TensorBoard``, ``RemoteMonitor`` and callbacks whose
        attribute ``rank_0_only`` is true run only on rank 0. Files with relative paths are written
        to rank 0's folder. If one callback stops the training, all workers stop after the same
        step. ``BackupAndRestore`` is replaced by a `Recovery` that resumes, with the same folder.
        An `Observer` runs in this session; `track_mlflow`, `track_wandb` and `track_tensorboard`
        record the run.
    class_weight
        Maps each class to the loss weight of its rows, for models with one output. Keys are class
        codes, or the values of a text label. Cannot be combined with sample weights.
    seed
        Makes training repeatable. None (default): a random seed, which the result reports.
    shuffle
        True (default) or ``"shard"``: each worker shuffles its own rows in each epoch. ``"global"``
        (arrays and files): all rows are shuffled and redistributed in each epoch, so every worker
        stores all rows. False: rows keep their order.
    """

    epochs: Annotated[int, Option(1, Whole(1))]
    steps_per_epoch: Annotated[int | None, Option(None, Whole(1, optional=True))]
    validation_data: Annotated[Any, Option()]
    validation_split: Annotated[float, Option(0.0, check_fraction)]
    validation_freq: Annotated[int | Collection[int], Option(1, _validation_freq)]
    callbacks: Annotated[Sequence[Any] | None, Option()]
    class_weight: Annotated[Mapping[Any, float] | None, Option(None, _class_weight)]
    seed: Annotated[int | None, Option(None, _seed)]
    shuffle: Annotated[Shuffle, Option(True, Choice((True, False, "shard", "global")))]


class ColumnOptions(TypedDict, total=False):
    """Columns of tables, and how to read them.

    Parameters
    ----------
    features
        Columns of a data frame or of files. A list: the columns form one input, of whole numbers if
        all columns hold them, with text as one-hot columns. A mapping from input names to columns:
        several inputs (one without a name has that of its layer); a text column becomes strings,
        unless `DataOptions` sets ``encode``. None (default): all other columns, or the ones used in
        training if ``model`` is a `TrainResult`.
    label
        The label column, or a mapping from output names to columns. Text becomes 0, 1, 2, ... in
        sorted order (`TrainResult.levels`), unless ``categories`` in `DataOptions` lists its
        values. None: the rows have no labels. ``label`` and ``weight`` are not taken from a
        `TrainResult`.
    weight
        Column with the weight of each row in the loss.
    data_options
        `DataOptions`: dtypes and shapes of columns, categories, and where workers store their rows.
    """

    features: Annotated[Features | None, Option()]
    label: Annotated[str | Mapping[str, str] | None, Option("label")]
    weight: Annotated[str | None, Option()]
    data_options: Annotated[DataOptions | None, Option(None, _object(check_data_options))]


class ExchangeOptions(TypedDict, total=False):
    """Exchange between workers, and recovery.

    Parameters
    ----------
    exchange
        `Exchange` (default): gradients are averaged in every step. `LocalSteps`: for slow networks;
        the result no longer equals that of one process. `ParameterServer`: asynchronous training,
        with a result that differs from that of one process. Then ``workers`` is the number of
        workers that take steps; a chief and the servers are additional processes.
    recovery
        `Recovery`, or only the folder of its checkpoints: saves the state of training, so that a
        call with ``Recovery(..., resume=True)`` can resume, and restarts the workers after one was
        lost.
    """

    exchange: Annotated[AnyExchange | None, Option(None, _object(check_exchange))]
    recovery: Annotated[Recovery | PathOrUri | None, Option(None, _object(check_recovery))]


class WorkerOptions(TypedDict, total=False):
    """Workers and the model, in all calls with a model.

    Parameters
    ----------
    resources
        `Resources`: cores, memory and GPUs of each worker. None (default): workers on the same
        machine divide its cores and GPUs.
    model_options
        `ModelOptions`: custom classes of the model, and where the trained model is written.
    verbose
        0: silent. 1 (default): progress. 2: also the workers' output. Progress is a bar with the
        loss, rows per second and the remaining time, on a terminal and in a notebook with
        ipywidgets; elsewhere it is a line per epoch. Python's logger ``tfdist`` receives all of it,
        whatever ``verbose`` is.
    """

    resources: Annotated[Resources | None, Option(None, _object(check_resources))]
    model_options: Annotated[ModelOptions | None, Option(None, _object(check_model_options))]
    verbose: Annotated[int, Option(1, _verbose)]


class TimeoutOptions(TypedDict, total=False):
    """Lost workers.

    Parameters
    ----------
    timeout
        Seconds that workers wait for each other to start, as in `Recovery`.
    """

    timeout: Annotated[float, Option(300.0, check_seconds)]


class KindOptions(TypedDict, total=False):
    """Kind of predictions.

    Parameters
    ----------
    type, levels, on_missing
        As in `TrainResult.predict`.
    """

    type: Annotated[PredictionType | None, Option()]
    levels: Annotated[Sequence[Any] | None, Option()]
    on_missing: Annotated[OnMissing, Option("null")]


class TrialOptions(BatchOptions, FitOptions, ColumnOptions, ExchangeOptions, WorkerOptions):
    """Options of `train_many`."""


class TrainingOptions(ElasticOptions, TrialOptions, total=False):
    """Options of `barrier_train`.

    Parameters
    ----------
    initial_epoch
        Number of epochs that were trained before. Training starts with epoch ``initial_epoch + 1``
        and ends with epoch ``epochs``, as in Keras's ``fit``.
    """

    initial_epoch: Annotated[int, Option(0, Whole(0))]


class EvaluationOptions(CountOptions, BatchOptions, ColumnOptions, WorkerOptions, TimeoutOptions):
    """Options of `barrier_evaluate`."""


class PredictionOptions(CountOptions, BatchOptions, KindOptions, WorkerOptions, TimeoutOptions):
    """Options of `barrier_predict`."""


class TablePredictionOptions(PredictionOptions, ColumnOptions):
    """Options of predictions that also read columns, as `predict_spark`."""


CALLS: dict[str, type] = {
    "barrier_train": TrainingOptions,
    "submit_training": TrainingOptions,
    "plan": TrainingOptions,
    "train_many": TrialOptions,
    "barrier_evaluate": EvaluationOptions,
    "barrier_predict": PredictionOptions,
}
# Classes of values for options, which have options themselves.
CLASSES: tuple[type, ...] = (DataOptions, Elastic, Exchange, LocalSteps, ModelOptions)
CLASSES += (ParameterServer, Recovery, Resources, ScaleLearningRate)


@dataclass(frozen=True)
class Described:
    """An option with its name, type and meaning."""

    name: str
    type: Any
    option: Option
    text: str

    @property
    def type_name(self) -> str:
        """The type as in code, without modules."""
        name = self.type.__name__ if isinstance(self.type, type) else repr(self.type)
        return re.sub(r"\b(?:\w+\.)+(?=\w)", "", name)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        named = {"name": self.name, "type": self.type_name, "default": self.option.default}
        check = self.option.check
        # The range or the choices of the value, as far as the check has them as data.
        limits = asdict(check) if isinstance(check, Whole | Choice) else {}
        return {**named, **limits, "text": self.text}


def read_texts(text: str | None) -> dict[str, str]:
    """Return what the section Parameters of a numpydoc docstring contains for each name."""
    _, _, section = inspect.cleandoc(text or "").partition("Parameters\n----------\n")
    section = re.split(r"\n(?=\w+\n---)", section)[0]
    parts = re.split(r"^((?:\S.*,\n)*\S.*)\n", section, flags=re.M)
    return {
        name: inspect.cleandoc(body)
        for names, body in zip(parts[1::2], parts[2::2], strict=True)
        for name in re.split(r",\s", names)
    }


@cache
def _texts() -> dict[tuple[str, Any], str]:
    """Return the texts of all options by name and type."""
    return {
        (name, group.__annotations__[name]): text
        for group in filter(is_typeddict, globals().values())
        for name, text in read_texts(group.__doc__).items()
    }


@cache
def list_options(group: type) -> dict[str, Described]:
    """Return the options of a class of this module by name, in the order of a signature."""
    return {
        name: Described(name, note.__origin__, note.__metadata__[0], _texts().get((name, note), ""))
        for name, note in group.__annotations__.items()
    }


def checks() -> dict[str, Check]:
    """Return the checks of all options by name."""
    known = (one for group in CALLS.values() for one in list_options(group).values())
    return {one.name: one.option.check for one in known if one.option.check is not None}


def complete(group: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the defaults of those that are not given."""
    return {**{name: one.option.default for name, one in list_options(group).items()}, **given}


def describe_options() -> dict[str, Any]:
    """Return all options as plain data, for documents and other languages.

    ``calls`` has the options of each call, in the order of its signature, and ``classes`` those of
    each class for the value of an option. Each is a dict of its name, type, default and text, and
    what its check knows: ``least`` and ``most``, or ``choices``.
    """
    every = {call: list_options(group).values() for call, group in CALLS.items()}
    calls = {call: [one.to_dict() for one in options] for call, options in every.items()}
    return {"calls": calls, "classes": {one.__name__: _describe_class(one) for one in CLASSES}}


def _describe_class(group: Any) -> list[dict[str, Any]]:
    texts = read_texts(group.__doc__)
    return [
        {"name": one.name, "type": one.type, "default": default, "text": texts[one.name]}
        for one in fields(group)
        for default in [None if one.default is MISSING else one.default]
    ]
