"""The arguments of a call as they were passed, and an error for unknown ones."""

from __future__ import annotations

import difflib
import inspect
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

from pybackend.errors import InputError, TfdistError, skip_frames
from pybackend.job.checkpoint import Checkpoint
from pybackend.job.job import Shuffle
from pybackend.job.options import (
    DataOptions,
    Elastic,
    Exchange,
    LocalSteps,
    ParameterServer,
    ScaleLearningRate,
)
from pybackend.job.resources import Resources
from pybackend.machine.janitor import check_temporary_folder
from pybackend.words import call_of, either, setting, show, term

# A path on the driver, or a URI.
Place = str | os.PathLike[str]
Features = Sequence[str] | Mapping[str, str | Sequence[str]]
OnMissing = Literal["null", "error"]
PredictionType = Literal["class", "prob", "raw"]
PredictionRuntime = Literal["keras", "onnx"]
Scaling = Literal["linear", "sqrt"]


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """Arguments that all calls with a model share."""

    model: Any
    batch_size: int = 32
    features: Features | None = None
    label: str | Mapping[str, str] | None = "label"
    weight: str | None = None
    data_options: DataOptions | None = None
    resources: Resources | None = None
    custom_objects: Mapping[str, Any] | None = None
    safe_mode: bool = True
    verbose: int = 1
    timeout: float = 300.0


@dataclass(frozen=True, kw_only=True)
class EvaluationCall(ModelCall):
    """Arguments of `barrier_evaluate` and `TrainResult.evaluate`."""

    workers: int | None = 1


@dataclass(frozen=True, kw_only=True)
class PredictionCall(ModelCall):
    """Arguments of `barrier_predict`, `predict_spark` and `TrainResult.predict`."""

    workers: int | None = 1
    type: PredictionType | None = None
    levels: Sequence[Any] | None = None
    on_missing: OnMissing = "null"


@dataclass(frozen=True, kw_only=True)
class TrainingCall(ModelCall):
    """Arguments of `barrier_train`.

    ``elastic`` and ``roles`` are derived from ``workers`` and ``exchange``, and
    ``discards_checkpoints`` from a `BackupAndRestore`; ``shares_memory`` is False to measure the
    exchange as between hosts.
    """

    spark: Any
    data: Any
    workers: int | Elastic | None = None
    elastic: Elastic | None = None
    epochs: int = 1
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_data: Any = None
    validation_split: float = 0.0
    validation_freq: int | Collection[int] = 1
    callbacks: Sequence[Any] | None = None
    class_weight: Mapping[Any, float] | None = None
    seed: int | None = None
    shuffle: Shuffle = True
    exchange: Exchange | LocalSteps | ParameterServer | None = None
    scale_lr: ScaleLearningRate | Scaling | None = None
    model_uri: Place | None = None
    checkpoint: Checkpoint | Place | None = None
    discards_checkpoints: bool = False
    shares_memory: bool = True
    restarts: int = 0
    roles: Mapping[str, int] | None = None
    tensorboard: bool | Place | None = None
    detach: bool | Place = False


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _list_instead() -> dict[str, str]:
    """Return what to pass instead of arguments that have another form here."""
    return {
        "x": f"pass `data{either('=', ' = ')}{term('(x, y)')}`",
        "y": f"pass `data{either('=', ' = ')}{term('(x, y)')}`",
        "sample_weight": f"pass `data{either('=', ' = ')}{term('(x, y, sample_weight)')}`",
        "validation_batch_size": "validation rows are read in batches of `batch_size`",
        "validation_steps": "all rows of `validation_data` are used",
        "steps": "all rows are used",
        "exchange": "evaluation always computes batch-dependent values from the global batch",
        "loss_over": f"pass `{setting(exchange=call_of('Exchange', loss_over=...))}`",
        "transport": f"pass `{setting(exchange=call_of('Exchange', transport=...))}`",
        "compression": f"pass `{setting(exchange=call_of('Exchange', compression=...))}`",
        "encrypt": f"pass `{setting(exchange=call_of('Exchange', encrypt=...))}`",
        "return_dict": f"it always returns a {term('dict')}",
        **dict.fromkeys(("num_workers", "num_proc", "num_processes"), "pass `workers`"),
        "use_multiprocessing": "each worker is a process: pass `workers`",
        "min_workers": f"pass `{setting(workers=call_of('Elastic', 4, min=2, max=8))}`",
        "max_workers": f"pass `{setting(workers=call_of('Elastic', 4, min=2, max=8))}`",
        "resume": f"pass `{setting(checkpoint=call_of('Checkpoint', ..., resume=True))}`",
        "roles": f"pass `{setting(exchange=call_of('ParameterServer', servers=1))}`",
        "strategy": (
            "omit it: the workers' gradients are averaged in every step. To train on parameter "
            f"servers, pass `{setting(exchange=call_of('ParameterServer', servers=1))}`"
        ),
        "gpus": f"pass `{setting(resources=call_of('Resources', gpus=1))}`, the number per worker",
        "cpus": f"pass `{setting(resources=call_of('Resources', cpus=4))}`, the number per worker",
        "memory": (
            f"pass `{setting(resources=call_of('Resources', memory='4GB'))}`, the memory per worker"
        ),
        "spark_context": f"pass a SparkSession as `{term('spark')}`",
        **{
            name: f"pass `{setting(data_options=call_of('DataOptions', **{name: ...}))}`"
            for name in (
                "tensors",
                "categories",
                "encode",
                "tfrecord_spec",
                "repartition",
                "in_memory",
            )
        },
    }


# Some of them exist only in calls with another argument.
_NEEDED = {
    "min_workers": "validation_data",
    "max_workers": "validation_data",
    "resume": "checkpoint",
    "roles": "exchange",
    "strategy": "exchange",
}


# Where code that is not the caller's own is: this package, other ones, and the standard library.
# Frames hold what their functions have opened: a call that found no free descriptor once kept five.
_OWN = (
    os.path.dirname(os.path.dirname(__file__)),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)


def explain_arguments(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that wrong arguments raise a helpful `InputError`, not a TypeError.

    The errors are those of `hide_frames`.
    """
    signature = inspect.signature(fn)

    @hide_frames
    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(_explain(fn.__name__, signature, args, kwargs) or str(error)) from None
        _open_standard_streams()
        check_temporary_folder()
        return fn(*args, **kwargs)

    return call


def hide_frames(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that errors, except tfdist's faults, come without its frames.

    What failed on a worker is in the message. Our frames would only hide the caller's line.
    """

    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return fn(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            # What the caller's own code did, such as an observer, comes after our frames.
            frames = skip_frames(error.__traceback__, _OWN)
            if frames is None and not isinstance(error, TfdistError | KeyboardInterrupt):
                raise  # a fault of ours
            raise error.with_traceback(frames)  # noqa: B904 (the same)

    return call


def _open_standard_streams() -> None:
    """Open standard streams that are missing, as in a daemon, on the null device.

    Otherwise the next file or connection would get one of their descriptors and be used as a
    stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the system assigns the lowest free number
            os.open(os.devnull, os.O_RDWR)


def suggest(unknown: str, known: Iterable[str]) -> str | None:
    """Suggest a replacement for an unknown argument; None if no argument is similar."""
    near = difflib.get_close_matches(unknown, list(known), 1)
    instead = _list_instead().get(unknown) if _NEEDED.get(unknown) in (None, *known) else None
    return instead or (f"did you mean `{near[0]}`?" if near else None)


def _explain(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    known = list(signature.parameters.values())
    by_place = [p.name for p in known if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_place):
        named = setting(**{known[len(by_place)].name: ...})
        if not by_place:
            return f"{name}() takes its arguments by name, e.g. {named}"
        return (
            f"{name}() takes {', '.join(f'`{place}`' for place in by_place)} by position, but "
            f"got {len(args)} positional arguments: pass arrays together as {term('(x, y)')}, and "
            f"other arguments by name, e.g. {named}"
        )
    unknown = next((given for given in kwargs if given not in signature.parameters), None)
    if unknown is not None:
        instead = suggest(unknown, signature.parameters) or "see its help"
        return f"{name}() has no argument `{unknown}`: {instead}"
    missing = [p for p in by_place if p not in kwargs][len(args) :]
    if not missing:
        return None
    first = signature.parameters.keys() & {"spark"} and (
        f": the first one, `{term('spark')}`, is {show(None)} or {show('local')} for this "
        "machine, or a SparkSession"
    )
    return f"{name}() needs {', '.join(f'`{one}`' for one in missing)}{first or ''}"
