"""The arguments of a call as they were passed, and an error for unknown ones."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, Self, TypeVar, Unpack

from pybackend.core.errors import InputError, TfdistError, skip_frames
from pybackend.core.job import call_options
from pybackend.core.job.job import ModelJob, make_job
from pybackend.core.job.storage_options import DataOptions
from pybackend.core.job.worker_options import Elastic, Exchange
from pybackend.core.launchers import Launcher
from pybackend.core.machine.janitor import check_temporary_folder
from pybackend.core.words import call_of, either, setting, show, term

Kind = TypeVar("Kind", bound=ModelJob)
IN_THIS_PROCESS = {"workers": 1}
_P = ParamSpec("_P")
_T = TypeVar("_T")
_EXCHANGE_OPTIONS = " ".join(field.name for field in fields(Exchange))
_DATA_OPTIONS = " ".join(field.name for field in fields(DataOptions))
# Where code that is not the caller's own is: this package, other ones, and the standard library.
# Frames hold what their functions have opened: a call that found no free descriptor once kept five.
_OWN = (
    # As in the frames: on other hosts, this package is an archive.
    os.path.dirname(os.path.dirname(skip_frames.__code__.co_filename)),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)
# Settings with which Keras ends training early, and the arguments that replace them.
_LIMITS = {"max_epochs": "epochs", "max_steps_per_epoch": "steps_per_epoch"}


class SparkSession(Protocol):
    """A ``pyspark.sql.SparkSession``, classic or Connect, for annotations without pyspark."""

    def createDataFrame(self, *args: Any, **kwargs: Any) -> Any: ...


# The first argument of a call.
Target = Launcher | SparkSession | Literal["local"] | None


class TrainedModel:
    """Base class of `TrainResult`: its model, and the columns that were used in training.

    What takes a result as an argument imports this class: the result itself can evaluate and
    predict, and so imports most of this folder.
    """

    features: Any
    tensors: Any
    categories: Any
    encode: Any
    levels: Any

    @property
    def model(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """Arguments of a call with a model; defaults complete its ``options``."""

    group: ClassVar[type]
    usual: ClassVar[dict[str, Any]] = {}

    model: Any
    options: Any

    def __post_init__(self) -> None:
        given = {**self.usual, **self.options}
        object.__setattr__(self, "options", call_options.complete(self.group, given))

    @property
    def result(self) -> TrainedModel | None:
        """The argument ``model`` if it is a result."""
        return self.model if isinstance(self.model, TrainedModel) else None

    def find_model(self) -> Any:
        """Return the model, or the function that builds it; a result may have to decode it."""
        return self.result.model if self.result else self.model

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, for `make_job`."""
        return {**vars(self), **self.options}

    def make_job(self, kind: type[Kind]) -> Kind:
        """Return the job of this call, with Keras's global settings."""
        return replace(make_job(kind, self.arguments), **read_keras_defaults())


@dataclass(frozen=True, kw_only=True)
class EvaluationCall(ModelCall):
    """Arguments of `barrier_evaluate` and `TrainResult.evaluate`."""

    group = call_options.EvaluationOptions
    usual = IN_THIS_PROCESS

    options: call_options.EvaluationOptions


@dataclass(frozen=True, kw_only=True)
class PredictionCall(ModelCall):
    """Arguments of `barrier_predict`, `predict_spark` and `TrainResult.predict`."""

    group = call_options.TablePredictionOptions
    usual = IN_THIS_PROCESS

    options: call_options.TablePredictionOptions

    @property
    def known_levels(self) -> tuple[str, ...] | None:
        """Names of the classes that a result has from its training."""
        levels = None if self.result is None else self.result.levels
        return None if levels is None else tuple(map(str, levels))


@dataclass(frozen=True, kw_only=True)
class TrainingCall(ModelCall):
    """Arguments of `barrier_train`.

    ``elastic``, ``roles``, ``tensorboard`` (a folder or URI for event files) and
    ``discards_checkpoints`` are derived from ``workers``, ``exchange`` and ``callbacks``. Without
    ``shares_memory``, the exchange is measured as between hosts.
    """

    group = call_options.TrainingOptions

    options: call_options.TrainingOptions
    spark: Any
    data: Any
    elastic: Elastic | None = None
    roles: Mapping[str, int] | None = None
    tensorboard: str | None = None
    discards_checkpoints: bool = False
    shares_memory: bool = True

    @property
    def data_arguments(self) -> dict[str, Any]:
        """The arguments that are data, by name."""
        return {"data": self.data, "validation_data": self.options["validation_data"]}

    def with_options(self, **options: Unpack[call_options.TrainingOptions]) -> Self:
        return replace(self, options={**self.options, **options})


def _list_advice(unknown: str) -> dict[str | None, dict[str, str]]:
    """Return what to pass instead of arguments that have another form here, by their names.

    They are grouped by the argument that a call must have: advice must not name one that it lacks.
    """
    given, count = f"pass `data{either('=', ' = ')}", "pass `workers`"
    servers = _pass(exchange=call_of("ParameterServer", servers=1))
    submit = f"call `{call_of('submit_training', ...)}`, which returns a job"

    def as_option(argument: str, maker: str, *first: Any) -> str:
        return _pass(**{argument: call_of(maker, *first, **{unknown: ...})})

    return {
        None: {
            "steps": "all rows are used, in batches of `batch_size`",
            "exchange": "evaluation always computes batch-dependent values from the global batch",
            "return_dict": f"it always returns a {term('dict')}",
            "spark": f"pass the connection as `{term('spark')}`",
            "spark_context": f"pass a SparkSession as `{term('spark')}`",
        },
        "data": {
            "x y": f"{given}{term('(x, y)')}`",
            "sample_weight": f"{given}{term('(x, y, sample_weight)')}`, or name a column with "
            "`weight`",
        },
        "model": {
            "optimizer loss metrics learning_rate": "the model has it: "
            f"`{either('model.', '')}compile({either('', 'model, ')}optimizer, loss, metrics)`"
        },
        "workers": {
            "num_workers num_proc num_processes": count,
            "use_multiprocessing": f"each worker is a process: {count}",
        },
        "validation_data": {
            "validation_batch_size": "validation rows are read in batches of `batch_size`",
            "validation_steps": "all rows of `validation_data` are used",
            "generator": "pass as `data` a function that returns a `tf.data.Dataset` of batches",
            "view_metrics": "`verbose` shows the progress, and the result draws the curves",
            "min_workers max_workers": _pass(workers=call_of("Elastic", 4, min=2, max=8)),
        },
        "callbacks": {
            "tensorboard": _pass(callbacks=[call_of("track_tensorboard", ...)]),
            "detach": f"{submit}; to plan that, call `{call_of('plan', ..., submit=True)}`",
            "submit": submit,
        },
        "exchange": {
            _EXCHANGE_OPTIONS: as_option("exchange", "Exchange"),
            "roles": servers,
            "strategy": "omit it: the workers' gradients are averaged in every step. To train on "
            f"parameter servers, {servers}",
        },
        "recovery": {
            "checkpoint": f"{_pass(recovery=call_of('Recovery', ...))}, or only the folder",
            "resume": _pass(recovery=call_of("Recovery", ..., resume=True)),
            "every keep pause": as_option("recovery", "Recovery", ...),
            "restarts timeout": as_option("recovery", "Recovery"),
        },
        "model_options": {
            "model_uri": _pass(model_options=call_of("ModelOptions", uri=...)),
            "custom_objects safe_mode": as_option("model_options", "ModelOptions"),
        },
        "data_options": {_DATA_OPTIONS: as_option("data_options", "DataOptions")},
        "resources": _list_resources(),
    }


def _list_resources() -> dict[str, str]:
    amounts = {"gpus": (1, "number"), "cpus": (4, "number"), "memory": ("4GB", "memory")}
    return {
        name: f"{_pass(resources=call_of('Resources', **{name: amount}))}, the {what} per worker"
        for name, (amount, what) in amounts.items()
    }


def _pass(**argument: Any) -> str:
    return f"pass `{setting(**argument)}`"


def take_options(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a call whose last parameter is ``**options`` with the options in `CALLS`.

    Its signature lists them, and its docstring describes those that it does not describe itself: in
    full if `barrier_train` does not have them, too.
    """
    known = call_options.list_options(call_options.CALLS[fn.__name__])
    signature = inspect.signature(fn)
    *own, _ = signature.parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    listed = [
        inspect.Parameter(name, kind, default=one.option.default, annotation=one.type_name)
        for name, one in known.items()
        if name not in signature.parameters
    ]
    fn.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
    if fn.__doc__ is not None:  # as with `python -OO`
        fn.__doc__ = _add_texts(fn.__doc__, fn.__name__, [one.name for one in listed])
    return fn


def _add_texts(doc: str, call: str, names: Sequence[str]) -> str:
    """Return a docstring with the texts of options at the end of its section Parameters."""
    known, usual = (
        call_options.list_options(call_options.CALLS[one]) for one in (call, "barrier_train")
    )
    left = [name for name in names if name not in call_options.read_texts(doc)]
    is_first = call == "barrier_train"
    own = [name for name in left if is_first or name not in usual]
    entries = [f"{name}\n{textwrap.indent(known[name].text, '    ')}" for name in own]
    if shared := [name for name in left if name not in own]:
        entries.append(f"{textwrap.fill(', '.join(shared), 96)}\n    As in `barrier_train`.")
    text = inspect.cleandoc(doc)
    _, _, rest = text.partition("Parameters\n----------\n")
    end = re.search(r"\n\n(?=\w+\n---)", rest)
    assert end is not None, f"{call} has no sections Parameters and Returns"
    end_of_section = len(text) - len(rest) + end.start()
    return "\n".join([text[:end_of_section], *entries]) + text[end_of_section:]


def explain_arguments(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that wrong arguments raise a helpful `InputError`, not a TypeError.

    The errors are those of `hide_frames`.
    """
    signature = inspect.signature(fn)

    @hide_frames
    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            # Not the call itself: a TypeError in it would be taken for a wrong argument.
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
    known = list(known)
    if unknown in ("detach", "submit") and "folder" in known:
        return "omit it: this call submits the training, and returns a job"
    near = difflib.get_close_matches(unknown, known, 1)
    advice = (of for needed, of in _list_advice(unknown).items() if needed in (None, *known))
    texts = (text for of in advice for names, text in of.items() if unknown in names.split())
    instead = next(texts, None)
    return instead or (f"did you mean `{near[0]}`?" if near else None)


def _explain(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    known = list(signature.parameters.values())
    by_position = [p.name for p in known if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_position):
        named = setting(**{known[len(by_position)].name: ...})
        if not by_position:
            return f"{name}() takes its arguments by name, e.g. {named}"
        return (
            f"{name}() takes {', '.join(f'`{one}`' for one in by_position)} by position, but "
            f"got {len(args)} positional arguments: pass arrays together as {term('(x, y)')}, and "
            f"other arguments by name, e.g. {named}"
        )
    unknown = next((given for given in kwargs if given not in signature.parameters), None)
    if unknown is not None:
        instead = suggest(unknown, signature.parameters) or "see its help"
        return f"{name}() has no argument `{unknown}`: {instead}"
    missing = [p for p in by_position if p not in kwargs][len(args) :]
    if not missing:
        return None
    first = signature.parameters.keys() & {"spark"} and (
        f": the first one, `{term('spark')}`, is {show(None)} or {show('local')} for this "
        "machine, or a SparkSession"
    )
    return f"{name}() needs {', '.join(f'`{one}`' for one in missing)}{first or ''}"


def read_keras_defaults() -> dict[str, Any]:
    """Return Keras's global settings; they can differ from the defaults only if Keras is loaded.

    One that ends every training run early raises an `InputError`: the workers would not know it.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    for name, argument in _LIMITS.items():
        limit = getattr(keras.config, name, lambda: None)()  # Keras 3.12 lacks it
        if limit is not None:
            raise InputError(
                f"{either('keras.config.', 'keras3::config_')}{name}() is {limit}, which ends "
                "every training run in this session early: call "
                f"{either('keras.config.set_', 'keras3::config_set_')}{name}({show(None)}), and "
                f"pass `{argument}` instead"
            )
    return {
        "epsilon": keras.config.epsilon(),
        "floatx": keras.config.floatx(),
        "dtype_policy": keras.config.dtype_policy().name,
        "image_data_format": keras.config.image_data_format(),
    }
