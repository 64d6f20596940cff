"""All checks of a training run before anything is started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from pybackend.api.calls import TrainingCall
from pybackend.api.checkpoints import check_resumes, resolve_checkpoint
from pybackend.api.datasets import read_training_data
from pybackend.api.observer import Observers, split_observers
from pybackend.api.planned_rows import count_known
from pybackend.api.request import Request, prepare
from pybackend.api.scaled import check_scale, resolve_scale
from pybackend.api.settings import describe_settings
from pybackend.data.datasets import is_dataset
from pybackend.errors import InputError
from pybackend.job.arguments import check_whole_number
from pybackend.job.checkpoint import check_checkpoint
from pybackend.job.job import MAX_WORKERS, TrainingJob
from pybackend.job.roles import check_roles, check_strategy
from pybackend.job.tensorboard import check_installed
from pybackend.launchers import Launcher, count_workers, launcher_for
from pybackend.r.function import RFunction

# Arguments that asynchronous training does not support, and why.
_SYNCHRONOUS = {
    "exchange": "workers do not exchange anything with each other",
    "callbacks": "the workers do not finish steps together, so there is no step after which to "
    "call them",
    "scale_lr": "each step uses the rows of one worker, regardless of the number of workers",
    "class_weight": "pass sample weights",
    "tensorboard": "it needs a callback",
    "steps_per_epoch": "an epoch always has one step for each batch of the rows",
}


def resolve_strategy(launcher: Launcher, call: TrainingCall) -> TrainingCall:
    """Return the call, with the number of all processes as ``workers``.

    Raises
    ------
    InputError
        An argument is not supported. The message names it and the reason.
    """
    strategy, roles = check_strategy(call.strategy), call.roles
    if strategy is None:
        if roles is not None:
            raise InputError(
                "`roles` needs strategy='parameter_server': without it, all processes are workers, "
                "and `workers` is their number"
            )
        return replace(call, workers=count_workers(launcher, call.workers))
    observers, others = split_observers(call.callbacks)
    if Observers(observers).see_steps:
        raise InputError(
            f"`on_step_end` of an Observer cannot be combined with strategy={strategy!r}: "
            f"{_SYNCHRONOUS['callbacks']}. Use `on_epoch_end`"
        )
    given = replace(call, callbacks=others)
    for name, reason in _SYNCHRONOUS.items():
        if getattr(given, name) not in (None, False, []):
            raise InputError(f"`{name}` cannot be combined with strategy={strategy!r}: {reason}")
    checkpoint = check_checkpoint(call.checkpoint)
    if checkpoint is not None and checkpoint.every != "epoch":
        raise InputError(
            f"`checkpoint` with strategy={strategy!r} needs every='epoch', "
            f"not {checkpoint.every!r}: steps are always running except between epochs"
        )
    if call.shuffle == "global":
        raise InputError(
            f"shuffle='global' cannot be combined with strategy={strategy!r}: each worker "
            "always has the same rows"
        )
    for name in ("data", "validation_data"):
        value = getattr(call, name)
        if is_dataset(value) or callable(value):
            raise InputError(
                f"with strategy={strategy!r}, `{name}` must be rows (arrays, a data frame or "
                "files): workers take steps independently, so batches of a data set or a function "
                "cannot be assigned to them"
            )
    roles = _choose_roles(launcher, roles, call.workers)
    count = sum(roles.values())
    return replace(call, roles=roles, workers=count_workers(launcher, count))


def _choose_roles(launcher: Launcher, roles: Any, workers: Any) -> dict[str, int]:
    """Return the number of processes per role; without ``roles``, one chief and one server."""
    if roles is None:
        given = count_workers(launcher, None, default=4) - 2 if workers is None else workers
        if workers is None and given < 1:
            raise InputError(
                "strategy='parameter_server' needs a chief, a worker and a parameter server, but "
                f"only {given + 2} processes were started: start 3 or more"
            )
        most = MAX_WORKERS - 2
        return {
            "chief": 1,
            "worker": check_whole_number("workers", given, least=1, most=most),
            "ps": 1,
        }
    counts = dict(check_roles(roles))
    if set(counts) != {"chief", "worker", "ps"}:
        raise InputError(
            "`roles` must have a chief, workers and parameter servers, e.g. {'chief': 1, "
            f"'worker': 2, 'ps': 1}}, not {roles!r}"
        )
    if workers not in (None, counts["worker"]):
        raise InputError(
            f"`workers` is {workers!r}, but `roles` has {counts['worker']} workers: omit `workers`"
        )
    return counts


@dataclass(frozen=True)
class PreparedTraining:
    """A checked training, its launcher, and its number of restarts."""

    request: Request[TrainingJob]
    launcher: Launcher
    restarts: int

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the training, as in `TrainResult`."""
        return describe_settings(self.request.job, self.launcher, self.restarts)


def prepare_training(call: TrainingCall) -> PreparedTraining:
    """Check the arguments of `barrier_train`, and encode them for the workers.

    Raises
    ------
    InputError
        An argument is wrong. The message names it.
    """
    launcher = launcher_for(call.spark)
    check_elastic_call(launcher, call)
    call = resolve_scale(resolve_strategy(launcher, call))
    restarts = check_whole_number("restarts", call.restarts, least=0)
    call = resolve_checkpoint(call)
    request = prepare(TrainingJob, call, partial(read_training_data, launcher, call))
    if launcher.is_here:
        _check_installed(request.job, call)
    check_resumes(request.job, {k: count_known(v) for k, v in request.datasets.items()})
    check_scale(request)
    return PreparedTraining(request, launcher, restarts)


def _check_installed(job: TrainingJob, call: TrainingCall) -> None:
    """Check the packages that workers with this process's Python need."""
    if job.tensorboard is not None:
        check_installed()
    is_in_r = isinstance(call.model, RFunction) or isinstance(call.data, RFunction)
    if is_in_r and find_spec("rpy2") is None:
        raise InputError(
            "functions written in R need the Python package rpy2 in the workers, which is missing "
            f"for {sys.executable}: pip install 'tfdist[r]'"
        )


def check_elastic_call(launcher: Launcher, call: TrainingCall) -> None:
    """Reject arguments that elastic training does not support.

    Raises
    ------
    InputError
        An argument is not supported. The message names it and the reason.
    """
    if call.min_workers is None and call.max_workers is None:
        return
    if launcher.why_fixed is not None:
        raise InputError(
            "`min_workers` and `max_workers` need workers that can leave and join, "
            f"but {launcher.why_fixed}: train on this machine ('local'), on hosts(...), slurm() "
            "or kubernetes(...), or omit them and use `restarts`, which restarts all workers "
            "after one is lost (with `checkpoint`, from the newest checkpoint)"
        )
    reason = None
    if call.strategy is not None:
        reason = f"strategy={call.strategy!r}: its workers take steps independently, so "
        reason += "training continues anyway if one is lost"
    elif callable(call.data) or callable(call.validation_data):
        reason = "a `data` function: only the function knows which rows each worker has"
    elif isinstance(call.data, (str, os.PathLike)) and call.shuffle != "global":
        reason = (
            "files when each worker reads only a share of them: pass shuffle='global', so that "
            "every "
        )
        reason += "worker has all rows"
    if reason is not None:
        raise InputError(f"`min_workers` cannot be combined with {reason}")
