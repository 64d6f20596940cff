"""Check a training before anything is started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from pybackend.api.calls import TrainingCall
from pybackend.api.checkpoints import check_resumes, settle_checkpoint
from pybackend.api.datasets import read_training_data
from pybackend.api.planned_rows import count_known
from pybackend.api.request import Request, prepare
from pybackend.api.scaled import check_scale, settle_scale
from pybackend.api.settings import describe_settings
from pybackend.api.strategy import settle_strategy
from pybackend.errors import InputError
from pybackend.job.arguments import check_whole_number
from pybackend.job.job import TrainingJob
from pybackend.job.tensorboard import check_installed
from pybackend.launchers import Launcher, launcher_for
from pybackend.r.function import RFunction


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
    call = settle_scale(settle_strategy(launcher, call))
    restarts = check_whole_number("restarts", call.restarts, least=0)
    call = settle_checkpoint(call)
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
            f"`min_workers` and `max_workers` need workers that can leave and join, but "
            f"{launcher.why_fixed}: train on this machine ('local'), on hosts(...), slurm() or "
            "kubernetes(...), or leave them out and use `restarts`, which restarts all workers "
            "after a loss, with `checkpoint` from the newest checkpoint"
        )
    reason = None
    if call.strategy is not None:
        reason = f"strategy={call.strategy!r}: its workers take steps independently, and "
        reason += "training continues without a lost one anyway"
    elif callable(call.data) or callable(call.validation_data):
        reason = "a function `data`: only the function knows which rows each worker has"
    elif isinstance(call.data, (str, os.PathLike)) and call.shuffle != "global":
        reason = "files of which each worker reads a share: pass shuffle='global', so that every "
        reason += "worker has all rows"
    if reason is not None:
        raise InputError(f"`min_workers` cannot be combined with {reason}")
