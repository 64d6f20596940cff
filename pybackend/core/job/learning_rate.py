"""Learning rates that are scaled with the number of workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import as_number, check_choice, name_arguments
from pybackend.core.words import call_of, either, show

Scaling = Literal["linear", "sqrt"]
_RULES = ["linear", "sqrt"]


@name_arguments
@dataclass(frozen=True)
class ScaleLearningRate:
    """Scale the learning rate with the number of workers.

    With N workers, a step has N times as many rows as with one. Each step uses the optimizer's own
    learning rate, as compiled or as set by callbacks, times `multiple`. The optimizer's variable
    does not change: the trained model, and every checkpoint, have the unscaled rate.

    Parameters
    ----------
    rule
        ``"linear"``: N times the rate (Goyal et al., 2017). ``"sqrt"``: the square root of N times
        the rate (Krizhevsky, 2014), which suits Adam and similar optimizers.
    warmup_epochs
        Number of epochs, possibly fractional, over which the rate rises step by step from the
        unscaled to the scaled one: gradual warm-up (Goyal et al., 2017).
    decay
        Maps the number of completed epochs to the factor for the rate from then on: ``{30: 0.1, 60:
        0.01}``. None (default): no decay.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    rule: Scaling = "linear"
    warmup_epochs: float = 0.0
    decay: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, choices=_RULES)
        object.__setattr__(self, "warmup_epochs", _check_warmup(self.warmup_epochs))
        object.__setattr__(self, "decay", _check_decay(self.decay))

    def multiple(self, workers: int, epochs: float) -> float:
        """Return the factor for the rate after a number of epochs, which may be fractional."""
        most = float(workers) if self.rule == "linear" else math.sqrt(workers)
        risen = min(1.0, epochs / self.warmup_epochs) if self.warmup_epochs else 1.0
        begun = [epoch for epoch in self.decay or {} if epoch <= epochs]
        decayed = (self.decay or {})[max(begun)] if begun else 1.0
        return (1.0 + (most - 1.0) * risen) * decayed


def check_scale_lr(value: Any) -> ScaleLearningRate | None:
    """Check the argument ``scale_lr``; the name of a rule becomes a `ScaleLearningRate`."""
    if value is None or isinstance(value, ScaleLearningRate):
        return value
    if isinstance(value, str) and value in _RULES:
        return ScaleLearningRate(value)  # type: ignore[arg-type]
    raise InputError(
        f"`scale_lr` must be {show(None)}, {show('linear')}, {show('sqrt')} or "
        f"{either('a ScaleLearningRate', 'a list')}, e.g. "
        f"{call_of('pybackend.ScaleLearningRate', 'linear', warmup_epochs=5)}, not {show(value)}"
    )


def _check_warmup(value: Any) -> float:
    number = as_number(value)
    if number is None or not (math.isfinite(number) and number >= 0):
        raise InputError(f"`warmup_epochs` must be at least 0, not {show(value)}")
    return number


def _check_decay(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    expected = (
        "`decay` must map epochs to multipliers of the learning rate, e.g. "
        f"{show({30: 0.1, 60: 0.01})}"
    )
    if not isinstance(value, Mapping) or not value:
        raise InputError(f"{expected}, not {show(value)}")
    checked: dict[int, float] = {}
    for key, multiple in value.items():
        # R's names, and JSON's, are text.
        epoch = float(key) if isinstance(key, str) and key.isdecimal() else as_number(key)
        number = as_number(multiple)
        if epoch is None or not epoch.is_integer() or epoch < 0:
            raise InputError(f"{expected}; it has the epoch {show(key)}")
        if number is None or not (math.isfinite(number) and number > 0):
            raise InputError(f"{expected}; it has the multiplier {show(multiple)} for {show(key)}")
        if int(epoch) in checked:
            raise InputError(f"`decay` has the epoch {int(epoch)} twice")
        checked[int(epoch)] = number
    return dict(sorted(checked.items()))
