"""Trials of `train_many`, and the result with all of them; model files are on disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

from pybackend.core.api.markup import NOTEBOOK
from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import counted
from pybackend.core.words import setting, show, show_loss
from pybackend.tuning.pruning import Mode, choose_mode, rank_value

Load = Callable[[], TrainResult]


class ModelFiles:
    """Model files of all trials of a call, in one temporary file without a name.

    The system deletes it when nothing uses it any more, even if this process is killed.
    """

    def __init__(self) -> None:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (as long as this object)
        # Results read it by its number and offsets, so threads share no position in the file.
        self._number = file.fileno()
        self._end = 0
        weakref.finalize(self, file.close)

    def store(self, result: TrainResult) -> Load:
        """Write the model file to disk; if there is too little space, it stays in memory.

        Returns a function that returns the result.
        """
        try:
            begin = self._write(result.content)
        except OSError:
            return partial(replace, result)
        return partial(self._load, replace(result, content=b""), begin, len(result.content))

    def _write(self, content: bytes) -> int:
        begin, left = self._end, memoryview(content)
        at = begin
        while left:  # a system call writes at most 2 GB
            written = os.pwrite(self._number, left, at)
            left, at = left[written:], at + written
        self._end = at  # only now: after an error, the next file is written there
        return begin

    def _load(self, result: TrainResult, begin: int, size: int) -> TrainResult:
        found = os.pread(self._number, size, begin)
        while len(found) < size:
            found += os.pread(self._number, size - len(found), begin + len(found))
        return replace(result, content=found)


Status = Literal["completed", "pruned", "failed"]
_LAST = ("trained_epochs", "seconds", "seed", "error")
# Columns of the table, which no argument may have as its name.
RESERVED = ("trial", "status", "trained_epochs", "seconds", "error")


@dataclass(frozen=True)
class Trial:
    """One training run of `train_many`.

    Attributes
    ----------
    number
        Number of the trial, from 1.
    arguments
        Its values by name.
    status
        ``"completed"``; ``"pruned"``: it was stopped early because others were better; or
        ``"failed"``.
    metrics
        The metrics of the last epoch by name; empty if it failed.
    trained_epochs
        Number of epochs that were trained; 0 if it failed.
    seconds
        Wall time.
    seed
        Seed of the training run.
    error
        Reason why it failed, with the rank and the host of the worker; else None.
    """

    number: int
    arguments: dict[str, Any]
    status: Status
    metrics: dict[str, Any]
    trained_epochs: int
    seconds: float
    seed: int
    error: str | None = None
    stored: Load | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # Without the model, which can be decoded again, but with its file.
        known = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**known, "stored": self.stored and partial(replace, self.stored())}

    @property
    def result(self) -> TrainResult | None:
        """Its `TrainResult`, whose model file each access reads from disk; None if it failed."""
        return None if self.stored is None else self.stored()

    @cached_property
    def model(self) -> Any:
        """The trained Keras model, decoded on first use.

        Raises
        ------
        InputError
            The trial failed.
        """
        if self.stored is None:
            raise InputError(f"trial {self.number} has no model: {self.error}")
        return self.stored().model

    @property
    def label(self) -> str:
        """The trial in words, such as ``trial 3 (units=16)``."""
        return f"trial {self.number} ({setting(**self.arguments)})"

    def describe(self) -> str:
        """Return a line for the trial, such as ``trial 3 (units=16)  loss 0.2912  (4.1 s)``."""
        parts = [self.label]
        if self.status == "pruned":
            parts.append(f"pruned after {counted(self.trained_epochs, 'epoch')}")
        if self.error is not None:
            parts.append(f"failed: {self.error}")
        parts += [f"{name} {_show(value)}" for name, value in self.metrics.items()]
        return "  ".join([*parts, f"({self.seconds:.1f} s)"])


@dataclass(frozen=True)
class Trials:
    """All trials of `train_many`: ``len(trials)``, ``for trial in trials``, and ``trials[0]``.

    As in any Python sequence, indexes start at 0; `Trial.number` starts at 1, as in messages, so
    ``trials[trial.number - 1]`` is that trial.

    Attributes
    ----------
    trials
        A `Trial` for each training run, in the order in which they were started.
    metric
        The metric by which trials are compared.
    mode
        ``"min"`` or ``"max"``: which values of the metric are better.
    parallelism
        Number of trials that ran at once.
    seconds
        Wall time of the whole call.
    """

    trials: list[Trial]
    metric: str
    mode: Mode
    parallelism: int
    seconds: float

    def __len__(self) -> int:
        return len(self.trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.trials)

    def __getitem__(self, index: int) -> Trial:
        return self.trials[index]

    def best(self, metric: str | None = None, mode: Mode | None = None) -> Trial:
        """Return the completed trial with the best value of a metric in its last epoch.

        Parameters
        ----------
        metric
            Name of the metric. None (default): that of this object.
        mode
            ``"min"`` or ``"max"``: which values are better. None (default): that of this object,
            or for another metric, as in `train_many`.

        Raises
        ------
        InputError
            No trial was completed, none has that metric, or an argument is invalid.
        """
        is_own = metric in (None, self.metric)
        metric = self.metric if metric is None else metric
        mode = self.mode if is_own and mode is None else choose_mode(metric, mode)
        found = [trial for trial in self.trials if trial.status == "completed"]
        if not found:
            failed = next((trial for trial in self.trials if trial.error), None)
            reason = "" if failed is None else f"; {failed.label} failed: {failed.error}"
            raise InputError(f"no trial was completed{reason}")
        known = [trial for trial in found if metric in trial.metrics]
        if not known:
            names = ", ".join(found[0].metrics)
            raise InputError(
                f"`metric` is {show(metric)}, but the trials have only {names}: pass one of these, "
                "or `validation_data` for values of validation rows"
            )
        return min(known, key=lambda trial: rank_value(trial.metrics[metric], mode))

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments of the trials, in order."""
        return list(dict.fromkeys(name for trial in self.trials for name in trial.arguments))

    @property
    def records(self) -> list[dict[str, Any]]:
        """A dict for each trial, with its arguments and metrics, all with the same keys."""
        arguments = self.arguments
        metrics = dict.fromkeys(name for trial in self.trials for name in trial.metrics)
        columns = {name: f"metric.{name}" if name in arguments else name for name in metrics}
        return [
            {
                "trial": trial.number,
                **{name: trial.arguments.get(name) for name in arguments},
                "status": trial.status,
                **{column: trial.metrics.get(name) for name, column in columns.items()},
                **{name: getattr(trial, name) for name in _LAST if name not in arguments},
            }
            for trial in self.trials
        ]

    def to_frame(self) -> Any:
        """Return the trials as a ``pandas.DataFrame`` with a row for each trial.

        Its columns are ``trial`` (the number), the arguments, ``status``, the metrics of the last
        epoch, ``trained_epochs``, ``seconds``, ``seed`` and ``error``. A metric with the name of an
        argument becomes ``metric.<name>``. Needs pandas.
        """
        import pandas as pd

        return pd.DataFrame(self.records)

    def __str__(self) -> str:
        counts = Counter(trial.status for trial in self.trials)
        counted_by_status = ", ".join(f"{count} {status}" for status, count in counts.items())
        lines = [
            f"{counted(len(self.trials), 'trial')} ({counted_by_status}), {self.parallelism} at "
            f"once, {self.seconds:.1f} s",
            *(trial.describe() for trial in self.trials),
        ]
        if any(t.status == "completed" and self.metric in t.metrics for t in self.trials):
            lines.append(f"best {self.metric}: trial {self.best().number}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        records = self.records
        heads = list(records[0]) if records else []
        given = self.arguments
        rows = [[_show(value, name in given) for name, value in one.items()] for one in records]
        first = NOTEBOOK.lines([str(self).partition("\n")[0]])
        return NOTEBOOK.element("div", first, NOTEBOOK.table(heads, rows), kind="block")


def _show(value: Any, is_given: bool = False) -> str:
    if value is None or is_given:
        return "" if value is None else show(value)
    if isinstance(value, float):
        return show_loss(value)
    return value if isinstance(value, str) else show(value)
