"""Rules that stop poor trials early."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import (
    check_choice,
    check_fields,
    check_whole_number,
    name_arguments,
)
from pybackend.core.words import either, show

Mode = Literal["min", "max"]
# Ends of the names of Keras's metrics.
_LARGER_IS_BETTER = ("accuracy", "acc", "auc", "precision", "recall", "f1_score", "r2_score", "iou")
# The metric of one trial by epoch, from 1; lower is better.
Values = Mapping[int, float]


@name_arguments
@dataclass(frozen=True)
class MedianPruning:
    """Stop a trial whose best value is worse than the median of other trials.

    After each epoch, the best value of the trial so far is compared with the best values that the
    other trials had after the same epoch (as Optuna does; after Golovin et al., 2017).

    Parameters
    ----------
    warmup_epochs
        Number of epochs that every trial runs.
    warmup_trials
        Number of other trials that must have reached the epoch.

    Raises
    ------
    InputError
        A number is invalid.
    """

    warmup_epochs: int = 1
    warmup_trials: int = 4

    def __post_init__(self) -> None:
        number = partial(check_whole_number, least=1)
        check_fields(self, warmup_epochs=number, warmup_trials=number)

    def prunes(self, epoch: int, own: Values, others: Sequence[Values]) -> bool:
        """Return whether to stop a trial after an epoch, given the values of all trials."""
        reached = [_find_best(other, epoch) for other in others if max(other, default=0) >= epoch]
        if epoch <= self.warmup_epochs or len(reached) < self.warmup_trials:
            return False
        return _find_best(own, epoch) > statistics.median(reached)


@name_arguments
@dataclass(frozen=True)
class SuccessiveHalving:
    """Stop all but the best trials after 1, 3, 9, ... epochs.

    At each of these epochs, a trial continues if it is among the best ``1 / factor`` of the trials
    that have reached the epoch so far. No trial waits for others (ASHA, Li et al., 2020).

    Parameters
    ----------
    first
        Number of epochs before the first comparison.
    factor
        After each comparison, one in this many trials continues. The next comparison is after this
        many times as many epochs.

    Raises
    ------
    InputError
        A number is invalid.
    """

    first: int = 1
    factor: int = 3

    def __post_init__(self) -> None:
        number = check_whole_number
        check_fields(self, first=partial(number, least=1), factor=partial(number, least=2))

    def prunes(self, epoch: int, own: Values, others: Sequence[Values]) -> bool:
        """Return whether to stop a trial after an epoch, given the values of all trials."""
        rung = self.first
        while rung < epoch:
            rung *= self.factor
        if rung != epoch:
            return False
        reached = [other[epoch] for other in others if epoch in other]
        best = max(1, (len(reached) + 1) // self.factor)
        return sum(value < own[epoch] for value in reached) >= best


Pruning = MedianPruning | SuccessiveHalving


def check_pruning(value: Any) -> Pruning | None:
    if value is None or isinstance(value, Pruning):
        return value
    rules = either(
        "None or a MedianPruning or a SuccessiveHalving",
        'NULL, "median", "halving" or a list, e.g. list("median", warmup_epochs = 2)',
    )
    raise InputError(f"`prune` must be {rules}, not {show(value)}")


def choose_mode(metric: Any, mode: Any) -> Mode:
    """Return whether smaller or larger values of a metric are better; None: by its name."""
    if not isinstance(metric, str):
        raise InputError(f"`metric` must be the name of a metric, not {show(metric)}")
    check_choice("mode", mode, choices=[None, "min", "max"])
    larger = metric.endswith(_LARGER_IS_BETTER) if mode is None else mode == "max"
    return "max" if larger else "min"


def rank_value(value: Any, mode: Mode) -> float:
    """Return a metric's value so that lower is better; a NaN is worse than all other values."""
    if math.isnan(value):
        return math.inf
    return -float(value) if mode == "max" else float(value)


def _find_best(values: Values, epoch: int) -> float:
    return min(value for number, value in values.items() if number <= epoch)
