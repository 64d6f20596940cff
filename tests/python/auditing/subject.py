"""Subjects of the audit's own tests: small trainings, faults in them, and their outcomes.

An outcome is what a user sees: the text of an error, or `audit` of a result. Each training runs
with ``audit="warn"``, so that the trained weights show how wrong a training is that the audit
passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import keras
import numpy as np
import replicas
from replicas import Case, Trained

import pybackend
from pybackend.core.job.worker_options import Exchange

Verdict = Literal["equal", "different", "undecided", "stopped", "unaudited"]
Change = tuple[Any, str, Callable[[Any], Any]]
"""A class or module, the name of a function in it, and a function from it to a faulty one."""

# Trained at once by one pair of workers.
_AT_ONCE = 40
# Relative errors that the audit must not pass.
_LARGEST, _LARGEST_HALF = 1e-3, 2e-2


@dataclass(frozen=True)
class Fault:
    """A fault in the workers' own code, of some size.

    Attributes
    ----------
    changes
        Returns the functions to replace, given the size and the rank of the worker.
    """

    name: str
    changes: Callable[[float, int], list[Change]]
    size: float


@dataclass
class Subject(Case):
    """One training.

    Attributes
    ----------
    is_half
        True if the model computes in half precision.
    fault
        Fault in the workers, or None.
    is_comparable
        True if the workers' weights should equal those of Keras's own fit in one process, up to
        rounding: nothing is random, and rounding errors are not magnified.
    """

    batch_size: int = 8
    is_half: bool = False
    fault: Fault | None = None
    is_comparable: bool = True

    @property
    def limit(self) -> float:
        """Largest relative error that the audit may pass."""
        return _LARGEST_HALF if self.is_half else _LARGEST


@dataclass
class Outcome:
    """Outcome of a training.

    Attributes
    ----------
    verdict
        ``"different"``: the audit reported a difference. ``"undecided"``: it gave a reason for not
        comparing a step. ``"equal"``: neither. ``"stopped"``: another error ended the training.
        ``"unaudited"``: no step was compared, without a reason.
    text
        The error, the difference or the reason; else the largest relative differences.
    trained
        The result of the workers; None after an error.
    """

    verdict: Verdict
    text: str
    trained: Trained | None = None


def read_outcome(found: Trained | str) -> Outcome:
    """Return the outcome of a result or an error of `replicas.train_all`."""
    if isinstance(found, str):
        is_audit = all("the result differs" in line for line in found.splitlines())
        return Outcome("different" if is_audit else "stopped", found)
    audit = found.audit
    if audit is None:
        return Outcome("unaudited", "no audit", found)
    if audit["differences"]:
        return Outcome("different", audit["differences"][0], found)
    if audit["skipped"]:
        return Outcome("undecided", audit["skipped"][0], found)
    shown = f"{audit['steps']} steps, {audit['weights']:.1e}, {audit['metrics']:.1e}"
    return Outcome("equal" if audit["steps"] else "unaudited", shown, found)


class Outcomes:
    """Outcomes of some subjects, which are trained in groups when one of them is needed."""

    def __init__(self, subjects: Mapping[str, Subject], folder: Path) -> None:
        self._subjects = dict(subjects)
        self._folder = folder
        self._groups = list(self._subjects)
        self._found: dict[str, Outcome] = {}
        self._starts: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> Outcome:
        if name not in self._found:
            place = self._groups.index(name) // _AT_ONCE * _AT_ONCE
            names = self._groups[place : place + _AT_ONCE]
            chosen = {one: self._subjects[one] for one in names}
            folder = self._folder / str(place)
            folder.mkdir()
            found = train_subjects(chosen, folder)
            self._found |= {one: read_outcome(result) for one, result in found.items()}
        return self._found[name]

    def measure(self, name: str, reference: str) -> float:
        """Return the relative error of a subject's weights, given one without a fault."""
        own, right = self[name].trained, self[reference].trained
        if own is None or right is None:
            return np.inf
        if reference not in self._starts:
            self._starts[reference] = read_start(self._subjects[reference])
        return find_error(own.model, right.model, self._starts[reference])

    def measure_history(self, name: str, reference: str) -> float:
        """Return the largest relative error of a value in the history."""
        own, right = self[name].trained, self[reference].trained
        if own is None or right is None:
            return np.inf
        pairs = [
            (np.asarray(own.history[key], float), np.asarray(values, float))
            for key, values in right.history.items()
        ]
        return max(float(np.max(np.abs(a - b) / (np.abs(b) + 1e-3))) for a, b in pairs)


def train_subjects(subjects: Mapping[str, Subject], folder: Path) -> dict[str, Any]:
    """Call `replicas.train_all` with faults; the audit only warns."""
    warned = {name: _warn(subject) for name, subject in subjects.items()}
    faults = {name: one.fault for name, one in subjects.items() if one.fault is not None}
    plain, run = replicas._work, pybackend.barrier_run

    def barrier_run(launcher: Any, work: Any, *arguments: Any, **options: Any) -> Any:
        return run(launcher, _work, plain, faults, *arguments, **options)

    with mock.patch.object(pybackend, "barrier_run", barrier_run):
        return replicas.train_all(warned, folder)


def _warn(subject: Subject) -> Subject:
    given = subject.settings.get("exchange", Exchange())
    exchange = replace(given, audit="warn")
    return replace(subject, settings={**subject.settings, "exchange": exchange})


def _work(
    context: Any,
    work: Callable[..., Any],
    faults: Mapping[str, Fault],
    folder: str,
    counts: Any,
) -> Any:
    """Call `replicas._work` in a worker; each training runs with its fault."""
    engine = sys.modules.get("pybackend.core.engine.train")
    if engine is None:
        import pybackend.core.engine.train as engine
    plain = engine.train

    def train(job: Any, collective: Any, rows: Any, own: Path, emit: Any) -> Any:
        import gc

        fault = faults.get(own.parent.name)
        changes = [] if fault is None else fault.changes(fault.size, context.rank)
        with ExitStack() as stack:
            for holder, name, make in changes:
                whole = holder.__dict__[name]
                stack.callback(setattr, holder, name, whole)
                setattr(holder, name, make(whole))
            try:
                return plain(job, collective, rows, own, emit)
            finally:
                gc.collect()

    engine.train = train
    try:
        return work(context, folder, counts)
    finally:
        engine.train = plain


def read_start(case: Case) -> list[Any]:
    """Return the weights with which the training of a case begins."""
    keras.utils.set_random_seed(1)
    return list(case.build().get_weights())


def find_error(found: Any, right: Any, start: list[Any]) -> float:
    """Return the error of a model's weights relative to their movement in a training.

    The larger one of the trainable weights' and the other variables'.
    """
    trainable = {id(v) for v in right.trainable_weights}
    kinds = [id(v) in trainable for v in right.weights]
    errors = []
    for kind in (True, False):
        chosen = [
            tuple(np.asarray(value, np.float64) for value in values)
            for *values, own, v in zip(
                found.get_weights(), right.get_weights(), start, kinds, right.weights, strict=True
            )
            if own is kind and "float" in str(v.dtype)
        ]
        error = sum(float(np.square(a - b).sum()) for a, b, _ in chosen)
        moved = sum(float(np.square(b - c).sum()) for _, b, c in chosen)
        if error:
            errors.append(np.sqrt(error / moved) if moved else np.inf)
    largest = max(errors, default=0.0)
    return float(largest) if np.isfinite(largest) else np.inf


def compare_with_one_process(case: Case, found: Trained) -> float:
    """Return the relative error of the workers' weights against Keras's fit in one process."""
    one, _ = replicas.replay(case)
    return find_error(found.model, one, read_start(case))
