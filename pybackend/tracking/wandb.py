"""Training runs as runs of Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pybackend.tracking as tracking
from pybackend.core.api.calls import explain_arguments
from pybackend.core.api.observer import Tracker
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import InputError
from pybackend.core.words import listed, show

_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
_NOT_IN_PROJECT = "\\#?%:"


@explain_arguments
def track_wandb(
    *,
    project: str | None = None,
    run_name: str | None = None,
    tags: Sequence[str] | None = None,
    group: str | None = None,
    steps: bool = True,
    log_model: bool = True,
) -> Tracker:
    """Record a training run in Weights & Biases. Pass the result in ``callbacks``.

    This session makes one run and records it, as described for `track_mlflow`: the settings are the
    run's ``config``, the values at the end its ``summary``, and the files and the model are
    artifacts. Workers neither import wandb nor need its key. If training fails, the run ends as
    failed, with the error as ``tfdist/error`` in its summary. A run that is active in this session
    (``wandb.init()``) is used and stays open. WANDB_MODE and the other variables of wandb hold.

    Parameters
    ----------
    project
        Name of the project. None (default): as set in WANDB_PROJECT.
    run_name
        Name of the run. None (default): wandb chooses one.
    tags
        List of tags.
    group
        Group of the run, e.g. for the trials of a search.
    steps, log_model
        As in `track_mlflow`.

    Returns
    -------
    Tracker
        An object for ``callbacks``. Each training with it makes a new run.

    Raises
    ------
    InputError
        wandb is not installed (``pip install 'tfdist[wandb]'``), or an argument is invalid.

    Examples
    --------
    >>> callbacks = [track_wandb(project="digits")]  # doctest: +SKIP
    """
    if isinstance(tags, str):
        tags = [tags]
    if tags is not None and not all(isinstance(tag, str) for tag in tags):
        raise InputError(f"`tags` must be a list of text, not {show(tags)}")
    return WandbTracker(run_name, steps, log_model, project, tuple(tags or ()), group)


def _check_project(source: str, name: str) -> None:
    """Check a name as wandb does, but before the training run is prepared."""
    if "/" in name:
        entity, _, rest = name.partition("/")
        raise InputError(
            f"{source} must be the name of a project, not {show(name)}: use {show(rest)}, and set "
            f"the environment variable WANDB_ENTITY to {show(entity)}"
        )
    if found := sorted(set(name) & set(_NOT_IN_PROJECT)):
        raise InputError(f"{source} must not contain {' '.join(found)}, as {show(name)} does")


class _WandbRun(tracking.TrackedRun):
    """A run. wandb itself sends what is logged in the background."""

    def __init__(self, wandb: Any, tracker: WandbTracker, prepared: PreparedTraining) -> None:
        super().__init__(tracker)
        self._wandb = wandb
        # Trials run at the same time: none of them is the active run of this process.
        active = None if tracker.is_trial else wandb.run
        self._is_own = active is None
        self._run = active or wandb.init(
            project=tracker.project,
            name=tracker.run_name,
            tags=list(tracker.tags),
            group=tracker.group,
            reinit="create_new" if tracker.is_trial else None,
            settings=wandb.Settings(silent=prepared.job.verbose == 0),
        )
        config = tracking.describe_parameters(prepared, tracker) | tracking.describe_origin()
        self._run.config.update(config, allow_val_change=True)
        # Values of an epoch and of a step have axes of their own, or wandb's count of calls, which
        # mixes both, is the axis of all charts.
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")
        self._run.define_metric("step/number")
        self._run.define_metric("step/*", step_metric="step/number")
        self._add_plan(prepared)

    def log(self, axis: Literal["epoch", "step"], number: int, values: Mapping[str, float]) -> None:
        """Record metrics with their own axis: wandb counts the calls itself."""
        self._run.log({"epoch" if axis == "epoch" else "step/number": number, **values})

    def _add_result(self, result: TrainResult) -> None:
        self._run.summary.update(tracking.describe_result(result) | tracking.describe_hosts(result))

    def _add_error(self, text: str) -> None:
        self._run.summary["tfdist/error"] = text

    def _add_files(self, folder: str, kind: str) -> None:
        artifact = self._wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
        artifact.add_dir(folder)
        self._run.log_artifact(artifact)

    def _end(self, error: BaseException | None) -> None:
        if self._is_own:
            self._run.finish(exit_code=int(error is not None))


@dataclass(frozen=True)
class WandbTracker(tracking.RunTracker):
    """Settings of `track_wandb`."""

    project: str | None
    tags: tuple[str, ...]
    group: str | None
    is_trial: bool = False

    system = package = "wandb"
    run = _WandbRun
    advice = "Log in with `wandb login`, or set WANDB_MODE=offline and run `wandb sync` later"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_project("`project`", self.project or "")
        _check_project("WANDB_PROJECT", os.environ.get("WANDB_PROJECT", ""))
        mode = os.environ.get("WANDB_MODE")
        if mode and mode not in _MODES:
            raise InputError(f"WANDB_MODE must be {listed(_MODES[:3])}, not {show(mode)}")

    def for_trial(self, number: int, arguments: Mapping[str, Any]) -> WandbTracker:
        """Return the settings for a run beside others of this process, in the same group."""
        name = f"{self.run_name or 'trial'}-{number}"
        group = self.group or "trials"
        return replace(self, run_name=name, group=group, is_trial=True, arguments=arguments)
