"""Values that the trials of `train_many` try: from a list, or from a study of Optuna."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_whole_number
from pybackend.core.job.worker_options import Exchange
from pybackend.core.words import call_of, either, setting, show, term
from pybackend.tuning.pruning import Mode, Pruning, check_pruning, choose_mode, rank_value
from pybackend.tuning.trials import RESERVED, Trial

# Arguments of `train_many` itself that may differ between trials.
OPTIONS = ("batch_size", "epochs", "exchange", "seed", "steps_per_epoch")
Arguments = dict[str, Any]


@dataclass(frozen=True)
class ModelFunction:
    """A function that builds the model of a trial from arguments."""

    # Called with the arguments and the seed: returns the `model` of `barrier_train`.
    build: Callable[[Arguments, int], Any]
    known: Collection[str]  # names of all its arguments
    needed: Collection[str] = ()  # and of those without a default
    takes_any: bool = False  # it also takes arguments with other names

    @classmethod
    def of(cls, model: Any) -> ModelFunction:
        """Return it for the argument ``model`` of `train_many`; `InputError` if that is not a
        function.
        """
        if isinstance(model, ModelFunction):
            return model
        if not callable(model) or hasattr(model, "fit"):  # a model is callable, too
            raise InputError(
                "`model` must be a function that returns a compiled Keras model, and whose "
                f"arguments are the names in `grid`, not a {type(model).__name__}"
            )
        try:
            parameters = list(inspect.signature(model).parameters.values())
        except (ValueError, TypeError):  # some built-in functions have no signature
            parameters = []
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            lambda arguments, seed: partial(model, **arguments) if arguments else model,
            [p.name for p in named],
            [p.name for p in named if p.default is p.empty],
            any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def split(self, arguments: Arguments) -> tuple[Arguments, Arguments]:
        """Divide the values of a trial into those of this function and those of the call."""
        own = {name: value for name, value in arguments.items() if name not in OPTIONS}
        return own, {name: value for name, value in arguments.items() if name in OPTIONS}

    def check(self, names: Collection[str]) -> None:
        """Raise `InputError` for names in a grid that are unknown or ambiguous, and for missing
        arguments.
        """
        for name in names:
            if name in OPTIONS and name in self.known:
                raise InputError(
                    f"`grid` has `{name}`, which is an argument both of this call and of the "
                    "`model` function: rename the argument of the function"
                )
            if name in RESERVED:
                raise InputError(f"`grid` has `{name}`, which is a column of the result: rename it")
            if name not in (*OPTIONS, *self.known) and not self.takes_any:
                raise InputError(
                    f"`grid` has `{name}`, which is neither an argument of the `model` function "
                    f"({', '.join(self.known) or 'it has none'}) nor one of {', '.join(OPTIONS)}"
                    f"{_explain(name)}"
                )
        missing = [name for name in self.needed if name not in names]
        if missing:
            raise InputError(
                f"the `model` function needs {', '.join(f'`{name}`' for name in missing)}, which "
                "`grid` does not have"
            )


def _explain(name: str) -> str:
    """Explain how to try values of an option of the exchange."""
    if name not in {field.name for field in fields(Exchange)}:
        return ""
    value = call_of("Exchange", **{name: ...})
    return f": pass `{either(f'exchange=[{value}]', f'exchange = list({value})')}` in `grid`"


def list_trials(grid: Any) -> list[Arguments]:
    """Return the arguments of each trial for the argument ``grid``."""
    if isinstance(grid, Mapping):
        trials = _combine(grid)
    elif callable(getattr(grid, "to_dict", None)) and hasattr(grid, "columns"):
        trials = _read_frame(grid)
    elif isinstance(grid, Sequence) and not isinstance(grid, (str, bytes)):
        if wrong := [row for row in grid if not isinstance(row, Mapping)]:
            raise InputError(f"{_expected()}; it has {show(wrong[0])}")
        trials = [{name: _as_plain(value) for name, value in row.items()} for row in grid]
    else:
        raise InputError(f"{_expected()}, not {show(grid)}")
    if not trials:
        raise InputError("`grid` has no trials")
    if other := [name for row in trials for name in row if not isinstance(name, str)]:
        raise InputError(f"{_expected()}; it has the name {show(other[0])}")
    return trials


def _expected() -> str:
    return (
        f"`grid` must be a {term('dict')} of lists of values, e.g. "
        f"{setting(grid={'units': [16, 64], 'rate': [0.1, 0.01]})}, a list with a {term('dict')} "
        "for each trial, or a data frame with a row for each trial"
    )


def _combine(grid: Mapping[str, Any]) -> list[Arguments]:
    for name, values in grid.items():
        is_list = isinstance(values, Sequence) or hasattr(values, "tolist")
        if not is_list or isinstance(values, (str, bytes)):
            raise InputError(f"{_expected()}; `{name}` has {show(values)} instead of a list")
    lists = [map(_as_plain, values) for values in grid.values()]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*lists)]


def _read_frame(frame: Any) -> list[Arguments]:
    if hasattr(frame, "to_dicts"):
        return [dict(row) for row in frame.to_dicts()]
    columns = {str(name): [_as_plain(value) for value in frame[name]] for name in frame.columns}
    return [{name: values[row] for name, values in columns.items()} for row in range(len(frame))]


def _as_plain(value: Any) -> Any:
    """Return a number of NumPy as Python's."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


class ListedTrials:
    """Trials with known arguments, and a rule that stops poor ones."""

    def __init__(self, trials: list[Arguments], rule: Pruning | None, mode: Mode) -> None:
        self.count, self.mode = len(trials), mode
        self._trials, self._rule = trials, rule
        self.sees_epochs = rule is not None  # then `prunes` must be called after each epoch
        self._values: dict[int, dict[int, float]] = {}

    def list_known(self) -> list[Arguments]:
        """Return the arguments that are known in advance; if only names are, with any values."""
        return self._trials

    def ask(self, number: int) -> Arguments | None:
        """Return the arguments of a trial; None: there are no more trials."""
        return self._trials[number - 1] if number <= self.count else None

    def prunes(self, number: int, epoch: int, value: float) -> bool:
        """Return whether to stop a trial, given its metric after an epoch."""
        own = self._values.setdefault(number, {})
        own[epoch] = rank_value(value, self.mode)
        others = [values for other, values in self._values.items() if other != number]
        return self._rule is not None and self._rule.prunes(epoch, own, others)

    def tell(self, trial: Trial, value: float | None) -> None:
        """Note the result of a trial, and the value of its metric."""


class StudiedTrials:
    """Trials whose arguments an Optuna study suggests, and whose poor ones its pruner stops.

    The methods are as in `ListedTrials`; those of the study are called on one thread.
    """

    sees_epochs = True

    def __init__(self, study: Any, space: dict[str, Any], count: int) -> None:
        self.count = count
        self.mode: Mode = "max" if study.direction.name == "MAXIMIZE" else "min"
        self._study, self._space = study, space
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


TrialSource = ListedTrials | StudiedTrials


def choose_source(
    grid: Any, study: Any, trials: Any, rule: Any, metric: Any, mode: Any
) -> TrialSource:
    """Return the trials for these arguments of `train_many`."""
    chosen = choose_mode(metric, mode)
    if study is None:
        if trials is not None:
            raise InputError("`trials` is only used with `study`: a grid has its own number")
        return ListedTrials(list_trials(grid), check_pruning(rule), chosen)
    optuna = sys.modules.get("optuna")  # it is imported if there is a study
    if optuna is None or not isinstance(study, optuna.Study):
        raise InputError(
            f"`study` must be {show(None)} or the result of optuna.create_study(), not a "
            f"{type(study).__name__}"
        )
    if len(study.directions) > 1:
        raise InputError("`study` has several objectives, but trials are compared by one `metric`")
    kind = optuna.distributions.BaseDistribution
    if not isinstance(grid, dict) or not all(isinstance(one, kind) for one in grid.values()):
        raise InputError(
            "with `study`, `grid` must map names to Optuna's distributions, e.g. "
            "{'units': optuna.distributions.IntDistribution(4, 64)}, not " + show(grid)
        )
    if trials is None:
        raise InputError(f"`study` needs a number of trials, e.g. {setting(trials=20)}")
    source = StudiedTrials(study, grid, check_whole_number("trials", trials, least=1))
    if mode not in (None, source.mode):
        raise InputError(f"{setting(mode=mode)}, but `study` has the other direction")
    if rule is not None:
        raise InputError("`prune` cannot be combined with `study`, which has its own pruner")
    return source
