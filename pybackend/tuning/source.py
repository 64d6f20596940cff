"""Sources of trials: a list, or a study of Optuna."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_whole_number
from pybackend.core.words import setting, show
from pybackend.tuning.grid import Arguments, list_trials
from pybackend.tuning.pruning import Mode, Pruning, check_pruning, choose_mode, rank_value
from pybackend.tuning.result import Trial


class Source(Protocol):
    """Object that chooses the arguments of trials.

    Attributes
    ----------
    count
        Number of trials.
    mode
        ``"min"`` or ``"max"``: which values of the metric are better.
    sees_epochs
        Whether `prunes` must be called after each epoch.
    """

    count: int
    mode: Mode

    @property
    def sees_epochs(self) -> bool: ...

    def list_known(self) -> list[Arguments]:
        """Return the arguments that are known in advance; if only names are, with any values."""

    def ask(self, number: int) -> Arguments | None:
        """Return the arguments of a trial; None: there are no more trials."""

    def prunes(self, number: int, epoch: int, value: float) -> bool:
        """Return whether to stop a trial, given its metric after an epoch."""

    def tell(self, trial: Trial, value: float | None) -> None:
        """Note the result of a trial, and the value of its metric."""


class ListedTrials:
    """Trials with known arguments, and a rule that stops poor ones."""

    def __init__(self, trials: list[Arguments], rule: Pruning | None, mode: Mode) -> None:
        self.count = len(trials)
        self.mode = mode
        self._trials = trials
        self._rule = rule
        self._values: dict[int, dict[int, float]] = {}

    @property
    def sees_epochs(self) -> bool:
        return self._rule is not None

    def list_known(self) -> list[Arguments]:
        return self._trials

    def ask(self, number: int) -> Arguments | None:
        return self._trials[number - 1] if number <= self.count else None

    def prunes(self, number: int, epoch: int, value: float) -> bool:
        own = self._values.setdefault(number, {})
        own[epoch] = rank_value(value, self.mode)
        others = [values for other, values in self._values.items() if other != number]
        return self._rule is not None and self._rule.prunes(epoch, own, others)

    def tell(self, trial: Trial, value: float | None) -> None:
        pass


class StudiedTrials:
    """Trials whose arguments an Optuna study suggests, and whose poor ones its pruner stops.

    Parameters
    ----------
    study
        The study. Its methods are called on one thread.
    space
        Optuna's distributions by name.
    count
        Number of trials.
    """

    sees_epochs = True

    def __init__(self, study: Any, space: dict[str, Any], count: int, mode: Mode) -> None:
        self.count = count
        self.mode = mode
        self._study = study
        self._space = space
        self._asked: dict[int, Any] = {}

    def list_known(self) -> list[Arguments]:
        return [dict.fromkeys(self._space)]

    def ask(self, number: int) -> Arguments | None:
        if number > self.count:
            return None
        self._asked[number] = asked = self._study.ask(self._space)
        return dict(asked.params)

    def prunes(self, number: int, epoch: int, value: float) -> bool:
        self._asked[number].report(value, epoch)
        return bool(self._asked[number].should_prune())

    def tell(self, trial: Trial, value: float | None) -> None:
        states = sys.modules["optuna"].trial.TrialState
        asked = self._asked.pop(trial.number)
        if trial.status == "pruned":
            self._study.tell(asked, state=states.PRUNED)
        elif value is None:
            self._study.tell(asked, state=states.FAIL)
        else:
            self._study.tell(asked, value)


def choose_source(grid: Any, study: Any, trials: Any, rule: Any, mode: Mode) -> Source:
    """Return the source of trials for the arguments of `train_many`.

    Raises
    ------
    InputError
        An argument is invalid.
    """
    rule = check_pruning(rule)
    if study is None:
        if trials is not None:
            raise InputError(
                "`trials` is only used with `study`: `grid` has a fixed number of trials"
            )
        return ListedTrials(list_trials(grid), rule, mode)
    if rule is not None:
        raise InputError("`prune` cannot be combined with `study`, which has its own pruner")
    _check_study(study)
    kind = sys.modules["optuna"].distributions.BaseDistribution
    if not isinstance(grid, dict) or not all(isinstance(one, kind) for one in grid.values()):
        raise InputError(
            "with `study`, `grid` must map names to Optuna's distributions, e.g. "
            "{'units': optuna.distributions.IntDistribution(4, 64)}, not " + show(grid)
        )
    if trials is None:
        raise InputError(f"`study` needs a number of trials, e.g. {setting(trials=20)}")
    return StudiedTrials(study, grid, check_whole_number("trials", trials, least=1), mode)


def choose_direction(metric: Any, mode: Any, study: Any) -> Mode:
    """Return whether smaller or larger values of the metric are better: as a study says, if any.

    Raises
    ------
    InputError
        An argument is invalid.
    """
    chosen = choose_mode(metric, mode)
    if study is None:
        return chosen
    _check_study(study)
    direction: Mode = "max" if study.direction.name == "MAXIMIZE" else "min"
    if mode not in (None, direction):
        raise InputError(f"{setting(mode=mode)}, but `study` has the other direction")
    return direction


def _check_study(study: Any) -> None:
    optuna = sys.modules.get("optuna")  # it is imported if there is a study
    if optuna is None or not isinstance(study, optuna.Study):
        raise InputError(
            f"`study` must be {show(None)} or the result of optuna.create_study(), not a "
            f"{type(study).__name__}"
        )
    if len(study.directions) > 1:
        raise InputError("`study` has several objectives, but trials are compared by one `metric`")
