"""Choice of the steps to audit: some in any case, and others as far as there is time for them.

A `Window` is what is recorded of the chosen ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from pybackend.core.engine.exchange.transports import Exchanged

Values = dict[int, npt.NDArray[Any]]  # of variables, by the identity of the variable
OWN_FAULT = "The fault is in tfdist, not in the model: please report it, with this message"
# Share of a training run's time that audits may take, and seconds that they may take in any case.
_SHARE = 0.02
_FREE = 0.25
# The same share in the second epoch: by then optimizers have states.
_EARLY_SHARE = 0.1


class AuditPlan:
    """Steps of one epoch after another."""

    def __init__(self) -> None:
        self.spent = 0.0  # seconds of all audits
        self._cost = 0.0  # seconds of the last one
        self._began = time.monotonic()
        self.begin_epoch(0, None)

    def begin_epoch(
        self, steps: int, first: int | None, musts: Iterable[int] = (), is_second: bool = False
    ) -> None:
        """Begin an epoch; ``first`` is the first step that may be audited, None if none may be."""
        self._share = _EARLY_SHARE if is_second else _SHARE
        self.steps = steps  # number of steps of this epoch that may be audited
        self.musts = set(musts)  # steps of this epoch to audit in any case
        self._due: int | None = first  # the next step to consider
        self._last: int | None = None  # the last one that was audited
        self._epoch_began, self._spent_before = time.monotonic(), self.spent

    def is_due(self, last: int) -> bool:
        """Return whether a step up to this one is audited, if there is time."""
        return self._due is not None and self._due <= min(last, self.steps - 1)

    def is_must(self, last: int) -> bool:
        return any(step <= last for step in self.musts)

    def begin(self, first: int, last: int) -> None:
        self.musts = {step for step in self.musts if step > last}
        self._due, self._last = last + 1, first

    def end(self, seconds: float) -> None:
        self.spent += seconds
        self._cost = seconds

    def postpone(self, step: int) -> None:
        """Consider another step next; those that are audited in any case are not postponed."""
        self._due = min([step, *self.musts])

    def choose(self, step: int) -> int:
        """Return the step, if there is time to audit it, or else the step to consider next.

        Time that is left is spread over the rest of the epoch. The loss may change within it.
        """
        now = time.monotonic()
        room = _FREE + self._share * (now - self._began) - self.spent
        seconds = now - self._epoch_began - (self.spent - self._spent_before)
        rate = step / max(1e-6, seconds)
        if room < self._cost:
            return step + max(1, int(rate * (self._cost - room) / _SHARE))
        if self._last is None or not self._cost:
            return step
        target = self._last + max(1, (self.steps - 1 - self._last) // int(room / self._cost))
        later = step + max(1, int(rate * self._cost / _SHARE))  # there is time for another one
        return step if step >= target else min(target, later)


@dataclass
class Window:
    """Steps compared as one: those whose gradients the optimizer adds up, or a single step."""

    before: Values  # the values before the first step, of the variables that existed then
    memory: float  # size of the process at that time
    changed: dict[int, Values] = field(default_factory=dict)  # by callbacks, before each step
    numbers: Values = field(default_factory=dict)  # scalars after the last step
    digest: int = 0  # of the variables that callbacks must not change in between
    reason: str | None = None  # why the steps cannot be compared
    exchanged: list[Exchanged] = field(default_factory=list)  # if empty, weights are compared

    @property
    def steps(self) -> list[int]:
        return list(self.changed)


def describe_error(error: Exception) -> str:
    """Return the text of an error, without the lines that TensorFlow and Keras add."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    # Keras names a layer first; the traceback of a function that was traced comes first.
    at = 1 if lines[0].startswith("Exception encountered") else 0
    at = -1 if lines[0].startswith("in user code") or at >= len(lines) else at
    return f"{type(error).__name__}: {lines[at]}"
