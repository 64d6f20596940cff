"""All checks that a training run makes before anything is started, and its settings."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import pybackend
from pybackend.core.api import observer, training_hooks
from pybackend.core.api.call_data import count_known, note_index, read_training_data
from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.checkpoints import check_resumes, resolve_checkpoint
from pybackend.core.api.request import Request, prepare
from pybackend.core.data.batches import is_dataset
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import MAX_WORKERS, check_tensorboard, check_whole_number, counted
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Note
from pybackend.core.job.storage_options import Recovery, check_data_options, check_recovery
from pybackend.core.job.worker_options import Elastic, ParameterServer
from pybackend.core.launchers import Launcher, count_workers, launcher_for, warm_up
from pybackend.core.machine.packages import find_version
from pybackend.core.r.function import RFunction
from pybackend.core.words import call_of, install, setting, show, term

ReadData = Callable[[Launcher, TrainingCall, ColumnSpec, TrainingJob], Mapping[str, Any]]
# Arguments that asynchronous training does not support, and why.
_SYNCHRONOUS = {
    "callbacks": "the workers do not finish steps together, so there is no step after which to "
    "call them",
    "class_weight": "pass sample weights",
    "steps_per_epoch": "an epoch always has one step for each batch of the rows",
}
# The attribute of a callback that holds a path, by the name of its class.
_PATHS = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}
# Attributes of a job that are settings unchanged.
_OF_JOB = ("epochs", "initial_epoch", "batch_size", "steps_per_epoch", "shuffle", "seed")


def _asynchronous() -> str:
    return setting(exchange=call_of("ParameterServer", ...))


def resolve_roles(launcher: Launcher, call: TrainingCall) -> TrainingCall:
    """Return the call, with the total number of processes as ``workers``, and their roles."""
    servers, asked = call.options["exchange"], call.options["workers"]
    if not isinstance(servers, ParameterServer):
        return call.with_options(workers=count_workers(launcher, cast("int | None", asked)))
    observers, others = observer.split_observers(call.options["callbacks"])
    given: Mapping[str, Any] = {**call.options, "callbacks": others}
    needs_steps = f"{_SYNCHRONOUS['callbacks']}. Use `on_epoch_end`"
    sees_steps = observer.Observers(observers).see_steps
    rejected = {
        f"`on_step_end` of an {term('Observer')}": sees_steps and needs_steps,
        call_of("track_tensorboard"): call.tensorboard and "it needs a callback",
        **{
            f"`{name}`": given[name] not in (None, False, []) and reason
            for name, reason in _SYNCHRONOUS.items()
        },
        setting(shuffle="global"): given["shuffle"] == "global"
        and "each worker always has the same rows",
    }
    for what, reason in rejected.items():
        if reason:
            raise InputError(f"{what} cannot be combined with {_asynchronous()}: {reason}")
    checkpoint = check_recovery(given["recovery"]).checkpoint
    if checkpoint is not None and checkpoint.every != "epoch":
        raise InputError(
            f"`recovery` with {_asynchronous()} needs {setting(every='epoch')}, not "
            f"{show(checkpoint.every)}: steps are always running except between epochs"
        )
    for name, value in call.data_arguments.items():
        if is_dataset(value) or callable(value):
            raise InputError(
                f"with {_asynchronous()}, `{name}` must be rows (arrays, a data frame or "
                "files): workers take steps independently, so batches of a data set or a function "
                "cannot be assigned to them"
            )
    roles = _choose_roles(launcher, servers, asked)
    count = count_workers(launcher, sum(roles.values()))
    return replace(call, roles=roles).with_options(workers=count)


def _choose_roles(launcher: Launcher, asked: ParameterServer, workers: Any) -> dict[str, int]:
    """Return the number of processes per role: a chief, ``workers`` workers, and the servers."""
    others = 1 + asked.servers
    if workers is None:
        started = count_workers(launcher, None, default=others + 2)
        workers = started - others
        if workers < 1:
            raise InputError(
                f"{_asynchronous()} needs a chief, a worker and "
                f"{counted(asked.servers, 'parameter server')}, but only {started} processes were "
                f"started: start {others + 1} or more"
            )
    workers = check_whole_number("workers", workers, least=1, most=MAX_WORKERS - others)
    return {"chief": 1, "worker": workers, "ps": asked.servers}


@dataclass(frozen=True, kw_only=True)
class PreparedTraining(Request[TrainingJob]):
    """A checked training run, its launcher, its `Recovery`, and its trackers.

    ``settings`` are those of `TrainResult`. ``notes`` are what the caller must know before the
    start. The call ``began`` at this ``time.monotonic()``.
    """

    launcher: Launcher
    recovery: Recovery
    settings: dict[str, Any]
    trackers: tuple[observer.Tracker, ...]
    notes: tuple[Note, ...]
    began: float


def prepare_training(
    call: TrainingCall, read: ReadData = read_training_data, starts_workers: bool = True
) -> PreparedTraining:
    """Check the arguments of `barrier_train`, and encode them; ``read`` returns the data sets.

    ``starts_workers`` is whether this process will start workers, and may prepare for that.
    """
    began, launcher, given = time.monotonic(), launcher_for(call.spark), call.options["callbacks"]
    if starts_workers:
        warm_up(launcher, call.options["resources"])
    trackers, others = observer.split_trackers(given)
    folder, callbacks = observer.split_folder(others)
    call = replace(call, tensorboard=folder).with_options(callbacks=callbacks)
    # In this order: the limits of elastic training become a number, which the others take.
    call = resolve_roles(launcher, resolve_elastic(launcher, call))
    for hook in training_hooks():
        call = hook.resolve(call)
    call = resolve_checkpoint(call)
    recovery = check_recovery(call.options["recovery"])
    request = prepare(TrainingJob, call, partial(read, launcher, call))
    # Other machines have packages of their own.
    if launcher.is_here:
        _check_installed(request.job, call)
    check_resumes(request.job, {k: count_known(v) for k, v in request.datasets.items()})
    for hook in training_hooks():
        hook.check(request)
    request.observers.see_steps |= any(tracker.steps for tracker in trackers)
    settings = describe_settings(request.job, launcher, recovery.restarts)
    settings["validation_split"] = float(call.options["validation_split"]) or None
    settings["optimizer"] = describe_optimizer(request.model)
    return PreparedTraining(
        **vars(request),
        launcher=launcher,
        recovery=recovery,
        settings=settings,
        trackers=trackers,
        notes=(*note_files(given, launcher), *note_index(request.datasets)),
        began=began,
    )


def note_files(callbacks: Any, launcher: Launcher) -> list[Note]:
    """Return a note if files with relative paths will not be in this session's folder."""
    listed = observer.list_callbacks(callbacks)
    found = [file for one in listed for file in _relative_paths(one)]
    if launcher.is_here or not found:
        return []
    text = (
        f"{', '.join(found)}: worker 0 writes into its own folder on its host. Use an absolute "
        "path on storage that this session can read; or use the result's `history`, `checkpoint`, "
        "or early stopping with `restore_best_weights`"
    )
    return [Note(text)]


def _relative_paths(callback: Any) -> Iterator[str]:
    for kind in (kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _PATHS):
        path = getattr(callback, _PATHS[kind], None)  # None: another class of that name
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if text is not None and not os.path.isabs(text) and "://" not in text:
            yield f"{kind}({show(text)})"


def _check_installed(job: TrainingJob, call: TrainingCall) -> None:
    """Check the packages that workers with this process's Python need."""
    if job.tensorboard is not None:
        check_tensorboard()
    is_in_r = isinstance(call.model, RFunction) or isinstance(call.data, RFunction)
    if is_in_r and find_spec("rpy2") is None:
        raise InputError(
            "functions written in R need the Python package rpy2 in the workers, which is missing "
            f"for {sys.executable}: {install('r')}"
        )


def resolve_elastic(launcher: Launcher, call: TrainingCall) -> TrainingCall:
    """Return the call with a number as ``workers``, and with the limits of elastic training."""
    elastic = call.options["workers"]
    if not isinstance(elastic, Elastic):
        return call
    if launcher.why_fixed is not None:
        raise InputError(
            f"{setting(workers=call_of('Elastic', ...))} needs workers that can leave and join, "
            f"but {launcher.why_fixed}: train on this machine ({show('local')}), on hosts(...), "
            "slurm(), kubernetes(...) or Spark, or pass a number and `recovery`: its `restarts` "
            "restart all workers after one is lost, from the newest checkpoint if it has a folder"
        )
    reason = None
    if any(map(callable, call.data_arguments.values())):
        reason = "a `data` function: only the function knows which rows each worker has"
    elif isinstance(call.data, (str, os.PathLike)) and call.options["shuffle"] != "global":
        reason = (
            f"files when each worker reads only a share of them: pass {setting(shuffle='global')}, "
            "so that every worker has all rows"
        )
    elif not check_data_options(call.options["data_options"]).repartition:
        reason = f"{setting(repartition=False)}: every worker has all rows"
    if reason is not None:
        raise InputError(
            f"{setting(workers=call_of('Elastic', ...))} cannot be combined with {reason}"
        )
    workers = elastic.workers
    if workers is None:
        workers = max(count_workers(launcher, None), elastic.min)
        workers = min(workers, elastic.max or workers)
    return replace(call, elastic=elastic).with_options(workers=workers)


def describe_settings(job: TrainingJob, launcher: Launcher, restarts: int) -> dict[str, Any]:
    exchange = {name: one for name, one in asdict(job.exchange).items() if name != "scale_lr"}
    settings = {
        "launcher": launcher.where,
        "workers": job.workers,
        "elastic": job.elastic and {"min": job.elastic.min, "max": job.elastic.max},
        **{name: getattr(job, name) for name in _OF_JOB},
        "class_weight": dict(job.class_weight or ()) or None,
        "exchange": {"kind": type(job.exchange).__name__, **exchange},
        "scale_lr": job.scale_lr and asdict(job.scale_lr),
        "roles": dict(job.roles) or None,
        "resources": asdict(job.resources),
        "in_memory": job.in_memory,
        "checkpoint": job.checkpoint and asdict(job.checkpoint),
        "restarts": restarts,
        "model_uri": job.model_uri,
        "timeout": job.timeout,
        "versions": read_versions(launcher),
    }
    return _plain(settings)


def describe_optimizer(model: Any) -> dict[str, Any] | None:
    """Return the class of a compiled model's optimizer, with its arguments that are plain values.

    None if only the workers build the model.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return None
    try:
        config = dict(optimizer.get_config())
    except Exception:  # a custom class may raise any error
        config = {}
    return {"kind": type(optimizer).__name__, **_pick_plain(config)}


def _pick_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a configuration of Keras, except names."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and "class_name" in value:  # a schedule, or an optimizer
            found[name] = {"kind": value["class_name"], **_pick_plain(value["config"])}
        elif isinstance(value, float):
            found[name] = float(f"{value:.7g}")  # Keras has float32
        elif isinstance(value, bool | int | str) and name != "name":
            found[name] = value
    return _plain(found)


def read_versions(launcher: Launcher) -> dict[str, str | None]:
    packages = ["tensorflow", "keras", "numpy", *(["pyspark"] if launcher.session else [])]
    found = {"tfdist": pybackend.__version__, "python": platform.python_version()}
    return {**found, **{name: find_version(name) for name in packages}}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert names, and numbers that JSON cannot represent, to text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            value = _plain(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        found[str(name)] = value
    return found
