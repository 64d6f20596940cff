"""Cases measured in turns, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np


def interleaved(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Return the values of each case in every round, after a round that warms up."""
    found: dict[str, list[Any]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            value = case()
            if number:
                found[name].append(value)
    return found


def seconds(work: Callable[[], Any]) -> Callable[[], float]:
    """Return a case that measures the seconds of some work."""

    def timed() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return timed


def median_seconds(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each case."""
    found = interleaved({name: seconds(work) for name, work in cases.items()}, rounds)
    return {name: float(np.median(times)) for name, times in found.items()}
