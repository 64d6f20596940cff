"""All that is checked of a training before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from pybackend.api.checkpoints import check_resumes, settle_checkpoint
from pybackend.api.datasets import read_training_data
from pybackend.api.elastic import check_elastic_call
from pybackend.api.request import Request, prepare
from pybackend.api.scaled import check_scale, settle_scale
from pybackend.api.settings import describe_settings
from pybackend.api.strategy import settle_strategy
from pybackend.errors import InputError
from pybackend.job.arguments import check_whole_number
from pybackend.job.job import Job
from pybackend.job.tensorboard import check_installed
from pybackend.launchers import Launcher, launcher_for
from pybackend.r.function import RFunction


@dataclass(frozen=True)
class PreparedTraining:
    """A checked training, what will start its workers, and how often again."""

    request: Request
    launcher: Launcher
    restarts: int

    @property
    def settings(self) -> dict[str, Any]:
        """As in `TrainResult`."""
        return describe_settings(self.request.job, self.launcher, self.restarts)


def prepare_training(arguments: Mapping[str, Any]) -> PreparedTraining:
    """Check the arguments of `barrier_train`, by name, and encode what workers get of them.

    Raises
    ------
    InputError
        Names the argument that is wrong.
    """
    launcher = launcher_for(arguments["spark"])
    check_elastic_call(launcher, arguments)
    arguments = settle_strategy(launcher, arguments)
    arguments = settle_scale(arguments)
    restarts = check_whole_number("restarts", arguments["restarts"], least=0)
    arguments = settle_checkpoint(arguments)
    request = prepare("train", arguments, partial(read_training_data, launcher, arguments))
    if launcher.is_here:
        _check_installed(request.job, arguments)
    check_resumes(request.job)
    check_scale(request)
    return PreparedTraining(request, launcher, restarts)


def _check_installed(job: Job, arguments: Mapping[str, Any]) -> None:
    """Check what workers of this process's own Python would not find there."""
    if job.tensorboard is not None:
        check_installed()
    is_in_r = any(isinstance(arguments[name], RFunction) for name in ("model", "data"))
    if is_in_r and find_spec("rpy2") is None:
        raise InputError(
            "functions written in R run in workers by the Python package rpy2, which is missing "
            f"for {sys.executable}: pip install 'tfdist[r]'"
        )
