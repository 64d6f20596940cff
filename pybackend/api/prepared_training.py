"""All that is checked of a training before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pybackend.api.checkpoints import check_resumes, settle_checkpoint
from pybackend.api.datasets import read_training_data
from pybackend.api.elastic import check_elastic_call
from pybackend.api.request import Request, prepare
from pybackend.api.scaled import check_scale, settle_scale
from pybackend.api.settings import describe_settings
from pybackend.api.strategy import settle_strategy
from pybackend.job.arguments import check_whole_number
from pybackend.launchers import Launcher, launcher_for


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
    check_resumes(request.job)
    check_scale(request)
    return PreparedTraining(request, launcher, restarts)
