"""Time between Slurm's termination signal and the time limit of a job."""

from __future__ import annotations

import math
import re
from typing import Any

# Slurm may send the signal this much too early.
_EARLY_SECONDS = 60
# For shorter jobs, the notice would take too much of their time.
_SHORTEST_MINUTES = 10


def signal_option(time: Any, seconds: float, target: str = "") -> str | None:
    """Return sbatch's option ``signal`` for a job; None if its time limit is too short.

    Parameters
    ----------
    time
        Time limit in sbatch's format; None: the partition's, typically a day.
    seconds
        Time from the signal to the limit.
    target
        ``"B:"`` for the batch script instead of its steps.
    """
    minutes = None if time is None else read_minutes(str(time))
    if minutes is not None and minutes < _SHORTEST_MINUTES:
        return None
    return f"{target}TERM@{math.ceil(seconds)}"


def notice_seconds(option: Any) -> float:
    """Return the longest time before the limit at which ``signal`` may arrive; 0 without it."""
    found = re.search(r"@(\d+)", str(option or ""))
    return 0.0 if found is None else int(found[1]) + _EARLY_SECONDS


def read_minutes(time: str) -> float:
    """Return the minutes of ``"90"``, ``"1:30:00"`` or ``"2-12:00"``; infinity for other words."""
    if not re.fullmatch(r"[\d:-]+", time):
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part or 0) for part in rest.split(":")]
    if dash or len(parts) == 3:  # hours, minutes, seconds
        weights = (60.0, 1.0, 1 / 60)
    else:
        weights = (1.0, 1 / 60, 0.0)
    return int(days or 0) * 1440 + sum(w * p for w, p in zip(weights, parts, strict=False))
