"""Check a call with `strategy`: its roles, and arguments that it does not support."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pybackend.api.calls import TrainingCall
from pybackend.api.observer import Observers, split_observers
from pybackend.data.datasets import is_dataset
from pybackend.errors import InputError
from pybackend.job.arguments import check_whole_number
from pybackend.job.checkpoint import check_checkpoint
from pybackend.job.job import MAX_WORKERS
from pybackend.job.roles import check_roles
from pybackend.job.strategy import check_strategy
from pybackend.launchers import Launcher, count_workers

# Arguments that asynchronous training does not support, and why.
_SYNCHRONOUS = {
    "exchange": "workers do not exchange anything with each other",
    "callbacks": "the workers have no common step after which to call them",
    "scale_lr": "a step has the rows of one worker, however many there are",
    "class_weight": "pass sample weights",
    "tensorboard": "it needs a callback",
    "steps_per_epoch": "an epoch has as many steps as all rows make batches",
}


def settle_strategy(launcher: Launcher, call: TrainingCall) -> TrainingCall:
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
            f"`checkpoint` with strategy={strategy!r} needs every='epoch', not "
            f"{checkpoint.every!r}: only between two epochs no step is running"
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
                f"`{name}` must be rows with strategy={strategy!r} (arrays, a data frame, files): "
                "batches of a data set or a function belong to steps of one sequence"
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
                f"strategy='parameter_server' needs a chief, a worker and a parameter server, and "
                f"{given + 2} processes were started: start 3 or more"
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
            f"`workers` is {workers!r}, but `roles` has {counts['worker']} of them: leave it out"
        )
    return counts
