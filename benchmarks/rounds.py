"""Cases measured in turns, so that what the machine does besides meets them all alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np


def interleaved(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each case returns in every round; one before them warms up and does not count."""
    found: dict[str, list[Any]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            value = case()
            if number:
                found[name].append(value)
    return found


def seconds(work: Callable[[], Any]) -> Callable[[], float]:
    """A case that returns how long some work takes."""

    def timed() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return timed


def median_seconds(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """How long each case takes, in the middle of the rounds."""
    found = interleaved({name: seconds(work) for name, work in cases.items()}, rounds)
    return {name: float(np.median(times)) for name, times in found.items()}
