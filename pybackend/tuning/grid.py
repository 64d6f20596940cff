"""Values that the trials of `train_many` try, and the arguments to which they belong."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.worker_options import Exchange
from pybackend.core.words import call_of, either, setting, show, term
from pybackend.tuning.result import RESERVED

# Arguments of `train_many` itself that may differ between trials.
OPTIONS = ("batch_size", "epochs", "exchange", "seed", "steps_per_epoch")
Arguments = dict[str, Any]


@dataclass(frozen=True)
class ModelFunction:
    """A function that builds the model of a trial from arguments.

    Parameters
    ----------
    build
        Called with a dict of arguments and the seed: returns the ``model`` of `barrier_train`.
    known, needed
        Names of all its arguments, and of those without a default.
    takes_any
        Whether it also takes arguments with other names.
    """

    build: Callable[[Arguments, int], Any]
    known: Collection[str]
    needed: Collection[str] = ()
    takes_any: bool = False

    @classmethod
    def of(cls, model: Any) -> ModelFunction:
        """Return it for the argument ``model`` of `train_many`.

        Raises
        ------
        InputError
            It is not a function.
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
        options = {name: value for name, value in arguments.items() if name in OPTIONS}
        return {n: value for n, value in arguments.items() if n not in options}, options

    def check(self, names: Collection[str]) -> None:
        """Check the names in a grid.

        Raises
        ------
        InputError
            A name is unknown or ambiguous, or an argument without a default is missing.
        """
        for name in names:
            if name in OPTIONS and name in self.known:
                raise InputError(
                    f"`grid` has `{name}`, which is an argument both of this call and of the "
                    "`model` function: rename the argument of the function"
                )
            if name in RESERVED:
                raise InputError(
                    f"`grid` has `{name}`, which is a column of the result: rename the argument"
                )
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
    """Say how to try values of an option of the exchange."""
    if name not in {field.name for field in fields(Exchange)}:
        return ""
    value = call_of("Exchange", **{name: ...})
    return f": pass `{either(f'exchange=[{value}]', f'exchange = list({value})')}` in `grid`"


def list_trials(grid: Any) -> list[Arguments]:
    """Return the arguments of each trial for the argument ``grid``.

    Raises
    ------
    InputError
        It has another type, or is empty.
    """
    if isinstance(grid, Mapping):
        trials = _combine(grid)
    elif callable(getattr(grid, "to_dict", None)) and hasattr(grid, "columns"):
        trials = _read_frame(grid)
    elif isinstance(grid, Sequence) and not isinstance(grid, (str, bytes)):
        trials = [{n: _as_plain(v) for n, v in _check_row(row).items()} for row in grid]
    else:
        raise InputError(f"{_expected()}, not {show(grid)}")
    if not trials:
        raise InputError("`grid` has no trials")
    for row in trials:
        for name in row:
            if not isinstance(name, str):
                raise InputError(f"{_expected()}; it has the name {show(name)}")
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
    """Return the rows of a data frame of pandas or polars."""
    if hasattr(frame, "to_dicts"):
        return [dict(row) for row in frame.to_dicts()]
    columns = {str(name): list(frame[name]) for name in frame.columns}
    return [
        {name: _as_plain(values[row]) for name, values in columns.items()}
        for row in range(len(frame))
    ]


def _check_row(row: Any) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise InputError(f"{_expected()}; it has {show(row)}")
    return row


def _as_plain(value: Any) -> Any:
    """Return a number of NumPy as Python's."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
